//! The few socket calls that std does not have.
//!
//! Out: std's own types, non-blocking, so that everything else about a socket is safe code.
#![allow(unsafe_code)] // socket(2), connect(2) without blocking, setsockopt(2).

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Starts to connect and returns at once; writable means decided, see [`TcpStream::take_error`].
///
/// # Errors
/// What the kernel said, where it could say so at once.
pub fn dial(to: SocketAddr) -> io::Result<TcpStream> {
    let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: plain call; the result is checked before it becomes an OwnedFd.
    let fd = unsafe {
        let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        let fd = libc::socket(family, kind, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(fd)
    };
    let result = match to {
        SocketAddr::V4(v4) => {
            // SAFETY: all zeros is a valid sockaddr_in.
            let mut a: libc::sockaddr_in = unsafe { std::mem::zeroed() };
            a.sin_family = libc::AF_INET as libc::sa_family_t;
            a.sin_port = v4.port().to_be();
            a.sin_addr.s_addr = u32::from_ne_bytes(v4.ip().octets());
            connect(&fd, &a)
        }
        SocketAddr::V6(v6) => {
            // SAFETY: all zeros is a valid sockaddr_in6.
            let mut a: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
            a.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            a.sin6_port = v6.port().to_be();
            a.sin6_addr.s6_addr = v6.ip().octets();
            a.sin6_scope_id = v6.scope_id();
            connect(&fd, &a)
        }
    };
    match result {
        Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => Err(e),
        _ => Ok(TcpStream::from(fd)),
    }
}

fn connect<A>(fd: &OwnedFd, to: &A) -> io::Result<()> {
    let len = size_of::<A>() as libc::socklen_t;
    // SAFETY: `to` is a sockaddr of the socket's family, `len` bytes long, borrowed for the call.
    match unsafe { libc::connect(fd.as_raw_fd(), std::ptr::from_ref(to).cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A listener that does not block.
///
/// # Errors
/// What the kernel said.
pub fn listen(at: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(at)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Makes a connection a lane's: no blocking, no delay, and a send buffer of `send_buffer_bytes`
/// (0: the kernel's choice). `wmem_max` clamps the latter silently, which costs speed only.
///
/// # Errors
/// What the kernel said.
pub fn tune(stream: &TcpStream, send_buffer_bytes: u32) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    if send_buffer_bytes == 0 {
        return Ok(());
    }
    let value = libc::c_int::try_from(send_buffer_bytes).unwrap_or(libc::c_int::MAX);
    // SAFETY: the option's value is a c_int, borrowed for the call, with its own length.
    let rc = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            std::ptr::from_ref(&value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends what fits, without blocking and without SIGPIPE.
///
/// # Errors
/// What the kernel said.
pub fn send(stream: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the slice is borrowed for the call; the kernel only reads it.
    let n = unsafe { libc::send(stream.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}
