//! A way for datagrams that can be cut: what a worker advertises in place of its own address.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::net::UdpSocket;
use tokio::task::JoinHandle;

const DATAGRAM_BYTES_MAX: usize = 1 << 16;

pub(crate) struct Wire {
    address: SocketAddr,
    is_cut: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Wire {
    /// A way to this address.
    pub(crate) async fn to(target: SocketAddr) -> Self {
        let front = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
        let (address, is_cut) = (front.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let cut = is_cut.clone();
        let task = tokio::spawn(async move {
            let mut clients: HashMap<SocketAddr, Arc<UdpSocket>> = HashMap::new();
            let mut bytes = vec![0; DATAGRAM_BYTES_MAX];
            loop {
                // An error is of a datagram sent before.
                let Ok((n, from)) = front.recv_from(&mut bytes).await else { continue };
                let back = match clients.entry(from) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(new) => {
                        let back = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
                        back.connect(target).await.unwrap();
                        tokio::spawn(answers(back.clone(), front.clone(), from, cut.clone()));
                        new.insert(back)
                    }
                };
                if !cut.load(Ordering::Relaxed) {
                    let _ = back.send(&bytes[..n]).await;
                }
            }
        });
        Self { address, is_cut, task }
    }
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
    /// Nothing comes through any more, in neither direction.
    pub(crate) fn cut(&self) {
        self.is_cut.store(true, Ordering::Relaxed);
    }
    pub(crate) fn mend(&self) {
        self.is_cut.store(false, Ordering::Relaxed);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn answers(
    back: Arc<UdpSocket>,
    front: Arc<UdpSocket>,
    to: SocketAddr,
    cut: Arc<AtomicBool>,
) {
    let mut bytes = vec![0; DATAGRAM_BYTES_MAX];
    loop {
        let Ok(n) = back.recv(&mut bytes).await else { continue };
        if !cut.load(Ordering::Relaxed) {
            let _ = front.send_to(&bytes[..n], to).await;
        }
    }
}

/// An address that is free now.
pub(crate) fn free_address() -> SocketAddr {
    std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}
