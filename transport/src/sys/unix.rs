//! Unix sockets that carry messages and descriptors, which std does not have.
//!
//! Owns: the descriptors, and the file of a listener that has one. Out: whole messages, never
//! pieces, without blocking. Invariants: descriptors that come with a message are owned from then on,
//! and closed if nobody takes them; a message or list of descriptors that does not fit is refused,
//! never cut.
#![allow(unsafe_code)] // socket(2) and its like, control messages, SO_PEERCRED.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::str::FromStr;

/// Most descriptors that one message may carry.
pub const FDS_MAX: usize = 4;
/// Longest name of a socket, either kind.
pub const NAME_BYTES_MAX: usize = 107;

/// Where a socket is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Name {
    /// Without a file; it ends with its last descriptor. Known in one network namespace.
    Abstract(Vec<u8>),
    /// A file.
    File(PathBuf),
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Abstract(name) => write!(f, "@{}", name.escape_ascii()),
            Self::File(path) => write!(f, "{}", path.display()),
        }
    }
}

impl FromStr for Name {
    type Err = std::convert::Infallible;

    /// As it is displayed: `@name` has no file, everything else is one.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text.strip_prefix('@') {
            Some(name) => Self::Abstract(name.as_bytes().to_vec()),
            None => Self::File(text.into()),
        })
    }
}

impl Name {
    fn address(&self) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
        // SAFETY: all zeros is a valid sockaddr_un.
        let mut a: libc::sockaddr_un = unsafe { std::mem::zeroed() };
        a.sun_family = libc::AF_UNIX as libc::sa_family_t;
        // An abstract name begins with a zero, a path ends with one.
        let (at, bytes, end) = match self {
            Self::Abstract(name) => (1, name.as_slice(), 0),
            Self::File(path) => (0, path.as_os_str().as_bytes(), 1),
        };
        if bytes.is_empty() || bytes.len() > NAME_BYTES_MAX {
            let why = format!("a name of {} bytes; a socket's has 1 to 107", bytes.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        for (to, &from) in a.sun_path[at..].iter_mut().zip(bytes) {
            *to = from as libc::c_char;
        }
        let len = size_of::<libc::sa_family_t>() + at + bytes.len() + end;
        Ok((a, len as libc::socklen_t))
    }
}

fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: plain call; the result is checked before it becomes an OwnedFd.
    unsafe { owned(libc::socket(libc::AF_UNIX, kind, 0)) }
}

/// # Safety
/// `fd` is a fresh descriptor that nobody else owns, or an error's -1.
unsafe fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: the caller's promise.
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
}

fn done(rc: libc::c_int) -> io::Result<()> {
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes connections.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    name: Name,
}

impl Listener {
    /// Listens. A file appears under its name only when it can be dialled: it is made under another
    /// and moved, so that whoever finds one that refuses knows that it is dead.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn bind(name: Name) -> io::Result<Self> {
        let fd = socket()?;
        let first = match &name {
            Name::Abstract(_) => name.clone(),
            Name::File(path) => Name::File(path.with_extension("new")),
        };
        let (address, len) = first.address()?;
        // SAFETY: the address is a sockaddr_un, `len` bytes of it set, borrowed for the call.
        done(unsafe { libc::bind(fd.as_raw_fd(), std::ptr::from_ref(&address).cast(), len) })?;
        // SAFETY: plain call.
        done(unsafe { libc::listen(fd.as_raw_fd(), 128) })?;
        if let (Name::File(from), Name::File(to)) = (&first, &name) {
            std::fs::rename(from, to).inspect_err(|_| drop(std::fs::remove_file(from)))?;
        }
        Ok(Self { fd, name })
    }
    /// Where it listens.
    pub fn name(&self) -> &Name {
        &self.name
    }
    /// The next connection.
    ///
    /// # Errors
    /// What the kernel said; [`io::ErrorKind::WouldBlock`] if there is none.
    pub fn accept(&self) -> io::Result<Socket> {
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        let none = std::ptr::null_mut();
        // SAFETY: no address is asked for; the result is checked before it becomes an OwnedFd.
        unsafe { owned(libc::accept4(self.fd.as_raw_fd(), none, none.cast(), flags)) }.map(Socket)
    }
    /// The descriptor to poll.
    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Name::File(path) = &self.name {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// One connection.
#[derive(Debug)]
pub struct Socket(OwnedFd);

/// Who is at the other end: its process when it connected, or began to listen.
#[derive(Debug)]
pub struct Peer {
    /// Its number here; 0 if it is in a namespace that cannot be seen from here.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
    handle: Option<OwnedFd>,
}

impl Peer {
    /// Whether the process that the number stood for is still there, so that the number still
    /// stands for it. Unknown counts as no.
    pub fn is_alive(&self) -> bool {
        self.handle.as_ref().is_some_and(|handle| {
            let none = std::ptr::null::<libc::siginfo_t>();
            // SAFETY: plain call; signal 0 only asks.
            unsafe {
                libc::syscall(libc::SYS_pidfd_send_signal, handle.as_raw_fd(), 0, none, 0) == 0
                    // There, and another user's.
                    || io::Error::last_os_error().raw_os_error() == Some(libc::EPERM)
            }
        })
    }
}

impl Socket {
    /// Two that are connected to each other.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn pair() -> io::Result<(Self, Self)> {
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        let mut fds: [RawFd; 2] = [-1; 2];
        // SAFETY: the array takes two descriptors; they are fresh if the call succeeded.
        unsafe {
            done(libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()))?;
            Ok((Self(owned(fds[0])?), Self(owned(fds[1])?)))
        }
    }
    /// One that was given as a descriptor. What is no such socket fails at the first use, without
    /// blocking.
    pub fn given(fd: OwnedFd) -> Self {
        Self(fd)
    }
    /// The descriptor, for a peer.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
    /// Connects; a Unix socket does so at once or not at all.
    ///
    /// # Errors
    /// What the kernel said; [`io::ErrorKind::WouldBlock`] if too many are waiting there.
    pub fn dial(to: &Name) -> io::Result<Self> {
        let fd = socket()?;
        let (address, len) = to.address()?;
        // SAFETY: as in `bind`.
        done(unsafe { libc::connect(fd.as_raw_fd(), std::ptr::from_ref(&address).cast(), len) })?;
        Ok(Self(fd))
    }
    /// The descriptor to poll.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
    /// Sends one message, whole or not at all, without blocking and without SIGPIPE.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        if fds.len() > FDS_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut iov =
            libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let mut control = Control::new();
        // SAFETY: all zeros is a valid msghdr. The kernel only reads what it points to: `bytes`, and
        // a control buffer that is aligned and large enough for FDS_MAX descriptors.
        let n = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = &mut iov;
            message.msg_iovlen = 1;
            if !fds.is_empty() {
                let len = (fds.len() * size_of::<RawFd>()) as libc::c_uint;
                message.msg_control = control.as_mut_ptr();
                message.msg_controllen = libc::CMSG_SPACE(len) as usize;
                let head = libc::CMSG_FIRSTHDR(&message);
                (*head).cmsg_level = libc::SOL_SOCKET;
                (*head).cmsg_type = libc::SCM_RIGHTS;
                (*head).cmsg_len = libc::CMSG_LEN(len) as usize;
                for (i, fd) in fds.iter().enumerate() {
                    libc::CMSG_DATA(head).cast::<RawFd>().add(i).write_unaligned(fd.as_raw_fd());
                }
            }
            let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
            libc::sendmsg(self.0.as_raw_fd(), &message, flags)
        };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
    /// Receives one message and the descriptors with it; gives its length, 0 at the end.
    ///
    /// # Errors
    /// What the kernel said; [`io::ErrorKind::InvalidData`] for what does not fit.
    pub fn receive(&self, into: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
        fds.clear();
        let mut iov = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        let mut control = Control::new();
        // SAFETY: all zeros is a valid msghdr. The kernel writes into `into` and the control buffer,
        // both with their lengths. Headers are walked by the macros made for it, within the length
        // that the kernel set; each descriptor in them is fresh and becomes an OwnedFd once.
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = &mut iov;
            message.msg_iovlen = 1;
            message.msg_control = control.as_mut_ptr();
            message.msg_controllen = Control::BYTES;
            let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
            let n = libc::recvmsg(self.0.as_raw_fd(), &mut message, flags);
            let n = usize::try_from(n).map_err(|_| io::Error::last_os_error())?;
            let mut head = libc::CMSG_FIRSTHDR(&message);
            while !head.is_null() {
                if (*head).cmsg_level == libc::SOL_SOCKET && (*head).cmsg_type == libc::SCM_RIGHTS {
                    let data = libc::CMSG_DATA(head).cast::<RawFd>();
                    let bytes = (*head).cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                    for i in 0..bytes / size_of::<RawFd>() {
                        fds.push(OwnedFd::from_raw_fd(data.add(i).read_unaligned()));
                    }
                }
                head = libc::CMSG_NXTHDR(&message, head);
            }
            if message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
                fds.clear();
                return Err(io::ErrorKind::InvalidData.into());
            }
            Ok(n)
        }
    }
    /// Who is at the other end.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn peer(&self) -> io::Result<Peer> {
        let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut handle: libc::c_int = -1;
        // SAFETY: the options' values are a ucred and a c_int, with their own lengths; a descriptor
        // that is given is fresh, and checked before it becomes an OwnedFd.
        unsafe {
            let mut len = size_of::<libc::ucred>() as libc::socklen_t;
            let value = std::ptr::from_mut(&mut who).cast();
            let fd = self.0.as_raw_fd();
            done(libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, value, &mut len))?;
            let mut len = size_of::<libc::c_int>() as libc::socklen_t;
            let value = std::ptr::from_mut(&mut handle).cast();
            let option = libc::SO_PEERPIDFD;
            if libc::getsockopt(fd, libc::SOL_SOCKET, option, value, &mut len) != 0 && who.pid > 0 {
                // Before Linux 6.5. The process just spoke, so the number is still its own.
                handle = libc::syscall(libc::SYS_pidfd_open, who.pid, 0) as libc::c_int;
            }
            let handle = owned(handle).ok();
            Ok(Peer { pid: who.pid, uid: who.uid, handle })
        }
    }
}

/// Room for the descriptors of one message, aligned as control messages must be.
#[repr(C)]
union Control {
    _aligned: libc::cmsghdr,
    bytes: [MaybeUninit<u8>; Control::BYTES],
}

impl Control {
    // SAFETY: arithmetic only.
    const BYTES: usize =
        unsafe { libc::CMSG_SPACE((FDS_MAX * size_of::<RawFd>()) as libc::c_uint) } as usize;

    fn new() -> Self {
        Self { bytes: [MaybeUninit::zeroed(); Self::BYTES] }
    }
    fn as_mut_ptr(&mut self) -> *mut libc::c_void {
        std::ptr::from_mut(self).cast()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> Name {
        Name::Abstract(format!("kvlane-test-{:x}", crate::random::random()).into_bytes())
    }
    fn pair() -> (Socket, Socket) {
        let listener = Listener::bind(name()).unwrap();
        let a = Socket::dial(listener.name()).unwrap();
        let b = listener.accept().unwrap();
        (a, b)
    }
    fn open_fds() -> usize {
        std::fs::read_dir("/proc/self/fd").unwrap().count()
    }

    #[test]
    fn messages_and_descriptors_come_whole_or_not_at_all() {
        let (a, b) = pair();
        let (mut into, mut fds) = ([0; 8], Vec::new());
        assert_eq!(b.receive(&mut into, &mut fds).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let file = std::fs::File::open("/dev/null").unwrap();
        a.send(b"one", &[file.as_fd(), file.as_fd()]).unwrap();
        a.send(b"two", &[]).unwrap();
        assert_eq!(b.receive(&mut into, &mut fds).unwrap(), 3);
        assert_eq!((&into[..3], fds.len()), (&b"one"[..], 2));
        assert_eq!(b.receive(&mut into, &mut fds).unwrap(), 3);
        assert_eq!((&into[..3], fds.len()), (&b"two"[..], 0));
        let e = a.send(b"x", &[file.as_fd(); FDS_MAX + 1]).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::InvalidInput);
        a.send(b"longer than 8", &[file.as_fd()]).unwrap();
        let e = b.receive(&mut into, &mut fds).unwrap_err();
        assert_eq!((e.kind(), fds.len()), (io::ErrorKind::InvalidData, 0));
        drop(a);
        assert_eq!(b.receive(&mut into, &mut fds).unwrap(), 0);
    }

    /// Alone in its process under nextest only, so it looks at its own descriptors' growth loosely.
    #[test]
    fn more_descriptors_than_fit_are_closed() {
        let (a, b) = pair();
        let before = open_fds();
        for _ in 0..200 {
            let mut iov = libc::iovec { iov_base: c"x".as_ptr().cast_mut().cast(), iov_len: 1 };
            let mut control = [0u64; 64];
            // SAFETY: as in `send`, with room for 50 descriptors.
            let n = unsafe {
                let mut message: libc::msghdr = std::mem::zeroed();
                message.msg_iov = &mut iov;
                message.msg_iovlen = 1;
                message.msg_control = control.as_mut_ptr().cast();
                message.msg_controllen = libc::CMSG_SPACE(200) as usize;
                let head = libc::CMSG_FIRSTHDR(&message);
                (*head).cmsg_level = libc::SOL_SOCKET;
                (*head).cmsg_type = libc::SCM_RIGHTS;
                (*head).cmsg_len = libc::CMSG_LEN(200) as usize;
                for i in 0..50 {
                    libc::CMSG_DATA(head).cast::<RawFd>().add(i).write_unaligned(a.fd());
                }
                libc::sendmsg(a.fd(), &message, 0)
            };
            assert_eq!(n, 1);
            let (mut into, mut fds) = ([0; 8], Vec::new());
            let e = b.receive(&mut into, &mut fds).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::InvalidData);
        }
        assert!(open_fds() < before + 200, "descriptors are left open");
    }

    #[test]
    fn the_other_end_is_known() {
        let (a, _b) = pair();
        let peer = a.peer().unwrap();
        assert_eq!(peer.pid, std::process::id() as i32);
        assert!(peer.is_alive());
    }

    #[test]
    fn names_are_read_as_they_are_shown() {
        for text in ["@kvlane-1", "/tmp/nic.sock", "nic.sock"] {
            let name: Name = text.parse().unwrap();
            assert_eq!(name.to_string(), text);
            assert_eq!(matches!(name, Name::Abstract(_)), text.starts_with('@'));
        }
    }

    #[test]
    fn names_that_do_not_fit_are_refused() {
        for name in [Name::Abstract(vec![b'x'; 108]), Name::File("x".repeat(108).into())] {
            assert_eq!(Socket::dial(&name).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
        let e = Socket::dial(&name()).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::ConnectionRefused);
    }
}
