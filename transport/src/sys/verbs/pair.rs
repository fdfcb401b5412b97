//! Queue pairs: reliable connections between two NICs.

use std::ffi::{c_int, c_uint};
use std::ptr::NonNull;
use std::sync::Arc;

use kvlane_proto::{Error, ErrorKind, Result};

use super::abi::{self, Zero, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr};
use super::{Access, CompletionQueue, Context, Mtu, ProtectionDomain, check};

/// Numbers of queue pairs and of packets have so many bits.
const NUMBER_MAX: u32 = (1 << 24) - 1;

/// How much a queue pair holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairDepths {
    /// Sends that are posted and not completed.
    pub sends: u32,
    /// Receives that are posted and not used.
    pub receives: u32,
    /// Longest data that is copied into the request itself.
    pub inline_bytes: u32,
}

/// From reset: which port it is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToInit {
    /// From 1.
    pub port: u8,
    /// Place of the partition key.
    pub pkey_index: u16,
    /// What the other side may do.
    pub access: Access,
}

/// A path with GIDs: always on RoCE, and between subnets of InfiniBand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalRoute {
    /// This side's, by its place in the port's table now; at most 255.
    pub gid_index: u32,
    /// The other side's.
    pub destination: [u8; 16],
    /// Of IPv6; 20 bits.
    pub flow_label: u32,
    /// Routers it may cross.
    pub hop_limit: u8,
    /// DSCP and ECN.
    pub traffic_class: u8,
}

/// To where it can be reached: which other queue pair it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToReceive {
    /// The port of [`ToInit`].
    pub port: u8,
    /// Both sides must have the same.
    pub path_mtu: Mtu,
    /// The other queue pair.
    pub destination: u32,
    /// The number of its first packet.
    pub receive_psn: u32,
    /// Its LID; 0 on Ethernet.
    pub destination_lid: u16,
    /// At most 15.
    pub service_level: u8,
    /// Its GID, where there is one.
    pub global: Option<GlobalRoute>,
    /// What it is told to wait if no receive is posted, coded as in the header; at most 31.
    pub min_rnr_timer: u8,
    /// Reads that it may have under way here.
    pub max_destination_reads: u8,
}

/// To where it can send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToSend {
    /// The number of the first packet.
    pub send_psn: u32,
    /// Wait for an answer: 4.096 µs · 2^timeout; at most 31, 0 is for ever.
    pub timeout: u8,
    /// Tries after that; at most 7, which soft-RoCE takes as for ever.
    pub retries: u8,
    /// Tries where no receive was posted; at most 7, which is for ever.
    pub rnr_retries: u8,
    /// Reads that this side may have under way.
    pub max_reads: u8,
}

/// What a queue pair is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing.
    Reset,
    /// It takes receives.
    Init,
    /// It can be reached.
    ReadyToReceive,
    /// It can send.
    ReadyToSend,
    /// Sends are stopped.
    SendDrained,
    /// Sends failed.
    SendError,
    /// Everything posted is flushed.
    Error,
    /// By its number in the header.
    Other(u32),
}

type PostSend = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
type PostReceive =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;

/// One end of a reliable connection.
#[derive(Debug)]
pub struct QueuePair {
    domain: Arc<ProtectionDomain>,
    _sends: Arc<CompletionQueue>,
    _receives: Arc<CompletionQueue>,
    raw: NonNull<ibv_qp>,
    number: u32,
    depths: PairDepths,
    pub(super) post_send: PostSend,
    pub(super) post_receive: PostReceive,
}

// SAFETY: every call of libibverbs may come from any thread.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

/// Refuses what the field in the structure, or in the packets, cannot hold.
fn bounded(name: &'static str, value: u32, max: u32) -> Result<u32> {
    if value <= max {
        return Ok(value);
    }
    Err(Error::new(ErrorKind::LimitExceeded, format!("{name} is too large"))
        .with("asked", value)
        .with("max", max))
}

fn small(name: &'static str, value: u8, max: u8) -> Result<u8> {
    bounded(name, value.into(), max.into()).map(|_| value)
}

impl QueuePair {
    /// A new one, in reset. Requests tell of their end only if they ask for it.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        sends: &Arc<CompletionQueue>,
        receives: &Arc<CompletionQueue>,
        depths: PairDepths,
    ) -> Result<Self> {
        const CALL: &str = "ibv_create_qp";
        let context = domain.context();
        if !Arc::ptr_eq(sends.context(), context) || !Arc::ptr_eq(receives.context(), context) {
            return Err(Error::new(ErrorKind::Internal, "a completion queue of another device"));
        }
        let mut attr = ibv_qp_init_attr::zero();
        (attr.send_cq, attr.recv_cq) = (sends.raw(), receives.raw());
        attr.qp_type = abi::IBV_QPT_RC;
        attr.cap.max_send_wr = depths.sends;
        attr.cap.max_recv_wr = depths.receives;
        attr.cap.max_send_sge = 1;
        attr.cap.max_recv_sge = 1;
        attr.cap.max_inline_data = depths.inline_bytes;
        // SAFETY: the domain and the queues live, and are of one device; the attributes are borrowed
        // for the call.
        let raw = unsafe { (context.symbols().create_qp)(domain.raw(), &mut attr) };
        let raw = context.made(CALL, raw).map_err(|e| {
            e.with("sends", depths.sends)
                .with("receives", depths.receives)
                .with("inline_bytes", depths.inline_bytes)
        })?;
        // SAFETY: the pair was just made; its number never changes. The context's table is complete
        // since it was opened.
        let (number, ops) = unsafe { ((*raw.as_ptr()).qp_num, (*context.raw()).ops) };
        let (Some(post_send), Some(post_receive)) = (ops.post_send, ops.post_recv) else {
            // SAFETY: just made, and used by nobody.
            unsafe { (context.symbols().destroy_qp)(raw.as_ptr()) };
            return Err(context.failed(CALL, libc::EOPNOTSUPP));
        };
        Ok(Self {
            domain: domain.clone(),
            _sends: sends.clone(),
            _receives: receives.clone(),
            raw,
            number,
            depths: PairDepths {
                sends: attr.cap.max_send_wr,
                receives: attr.cap.max_recv_wr,
                inline_bytes: attr.cap.max_inline_data,
            },
            post_send,
            post_receive,
        })
    }
    /// By which the other side names it.
    pub fn number(&self) -> u32 {
        self.number
    }
    /// How much it holds; at least what was asked.
    pub fn depths(&self) -> PairDepths {
        self.depths
    }
    /// Reset to init: it takes receives.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn to_init(&self, to: &ToInit) -> Result<()> {
        let mut attr = ibv_qp_attr::zero();
        attr.qp_state = abi::IBV_QPS_INIT;
        attr.port_num = to.port;
        attr.pkey_index = to.pkey_index;
        // Relaxed ordering is a region's.
        attr.qp_access_flags = to.access.bits() & !abi::IBV_ACCESS_RELAXED_ORDERING;
        let mask = abi::IBV_QP_PKEY_INDEX | abi::IBV_QP_PORT | abi::IBV_QP_ACCESS_FLAGS;
        self.modify(&mut attr, mask, "init").map_err(|e| e.with("port", to.port))
    }
    /// Init to ready to receive.
    ///
    /// # Errors
    /// [`ErrorKind::LimitExceeded`] for a number that a packet cannot carry; what the kernel said.
    pub fn to_receive(&self, to: &ToReceive) -> Result<()> {
        let mut attr = ibv_qp_attr::zero();
        attr.qp_state = abi::IBV_QPS_RTR;
        attr.path_mtu = to.path_mtu as c_uint;
        attr.dest_qp_num = bounded("the other queue pair's number", to.destination, NUMBER_MAX)?;
        attr.rq_psn = bounded("the first packet's number", to.receive_psn, NUMBER_MAX)?;
        attr.max_dest_rd_atomic = to.max_destination_reads;
        attr.min_rnr_timer = small("min_rnr_timer", to.min_rnr_timer, 31)?;
        attr.ah_attr.port_num = to.port;
        attr.ah_attr.dlid = to.destination_lid;
        attr.ah_attr.sl = small("service_level", to.service_level, 15)?;
        if let Some(route) = to.global {
            attr.ah_attr.is_global = 1;
            let grh = &mut attr.ah_attr.grh;
            grh.dgid.raw = route.destination;
            grh.flow_label = bounded("flow_label", route.flow_label, (1 << 20) - 1)?;
            grh.sgid_index = bounded("gid_index", route.gid_index, 255)? as u8;
            grh.hop_limit = route.hop_limit;
            grh.traffic_class = route.traffic_class;
        }
        let mask = abi::IBV_QP_AV
            | abi::IBV_QP_PATH_MTU
            | abi::IBV_QP_DEST_QPN
            | abi::IBV_QP_RQ_PSN
            | abi::IBV_QP_MAX_DEST_RD_ATOMIC
            | abi::IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut attr, mask, "ready to receive").map_err(|e| {
            e.with("destination", to.destination).with("mtu", to.path_mtu.bytes()).with(
                "gid_index",
                to.global.map_or_else(|| "none".into(), |route| route.gid_index.to_string()),
            )
        })
    }
    /// Ready to receive to ready to send.
    ///
    /// # Errors
    /// As [`QueuePair::to_receive`].
    pub fn to_send(&self, to: &ToSend) -> Result<()> {
        let mut attr = ibv_qp_attr::zero();
        attr.qp_state = abi::IBV_QPS_RTS;
        attr.sq_psn = bounded("the first packet's number", to.send_psn, NUMBER_MAX)?;
        attr.timeout = small("timeout", to.timeout, 31)?;
        attr.retry_cnt = small("retries", to.retries, 7)?;
        attr.rnr_retry = small("rnr_retries", to.rnr_retries, 7)?;
        attr.max_rd_atomic = to.max_reads;
        let mask = abi::IBV_QP_SQ_PSN
            | abi::IBV_QP_TIMEOUT
            | abi::IBV_QP_RETRY_CNT
            | abi::IBV_QP_RNR_RETRY
            | abi::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut attr, mask, "ready to send")
    }
    /// Any state to error: everything posted is flushed. Once more flushes what was posted since, on
    /// devices that do not do so by themselves (soft-RoCE).
    ///
    /// # Errors
    /// What the kernel said.
    pub fn to_error(&self) -> Result<()> {
        let mut attr = ibv_qp_attr::zero();
        attr.qp_state = abi::IBV_QPS_ERR;
        self.modify(&mut attr, 0, "error")
    }
    fn modify(&self, attr: &mut ibv_qp_attr, mask: c_int, to: &'static str) -> Result<()> {
        let symbols = self.context().symbols();
        // SAFETY: the pair lives; the attributes are borrowed for the call.
        check(unsafe { (symbols.modify_qp)(self.raw(), attr, mask | abi::IBV_QP_STATE) })
            .map_err(|e| self.failed("ibv_modify_qp", e).with("to", to))
    }
    /// What it is doing, as the device says.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn state(&self) -> Result<State> {
        let (mut attr, mut init) = (ibv_qp_attr::zero(), ibv_qp_init_attr::zero());
        let query = self.context().symbols().query_qp;
        // SAFETY: the pair lives; both are borrowed for the call.
        check(unsafe { query(self.raw(), &mut attr, abi::IBV_QP_STATE, &mut init) })
            .map_err(|e| self.failed("ibv_query_qp", e))?;
        Ok(match attr.qp_state {
            abi::IBV_QPS_RESET => State::Reset,
            abi::IBV_QPS_INIT => State::Init,
            abi::IBV_QPS_RTR => State::ReadyToReceive,
            abi::IBV_QPS_RTS => State::ReadyToSend,
            abi::IBV_QPS_SQD => State::SendDrained,
            abi::IBV_QPS_SQE => State::SendError,
            abi::IBV_QPS_ERR => State::Error,
            other => State::Other(other),
        })
    }
    pub(super) fn raw(&self) -> *mut ibv_qp {
        self.raw.as_ptr()
    }
    fn context(&self) -> &Context {
        self.domain.context()
    }
    pub(super) fn failed(&self, call: &'static str, errno: c_int) -> Error {
        self.context().failed(call, errno).with("queue_pair", self.number)
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: destroyed once; what it hangs on is let go afterwards.
        let rc = unsafe { (self.context().symbols().destroy_qp)(self.raw()) };
        self.context().ended("ibv_destroy_qp", rc);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_a_packet_cannot_carry_are_refused_by_name() {
        assert_eq!(bounded("gid_index", 255, 255).unwrap(), 255);
        let e = bounded("gid_index", 256, 255).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::LimitExceeded);
        assert_eq!(e.to_string(), "limit_exceeded: gid_index is too large (asked=256, max=255)");
        assert!(small("retries", 8, 7).is_err());
    }
}
