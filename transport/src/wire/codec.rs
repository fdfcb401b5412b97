//! bincode 2 through serde: fixed-width little-endian integers, limited, no trailing bytes.
//!
//! This is the only place that names bincode, so that another codec is one file. bincode without a
//! limit panics on a hostile length; every decode here is limited. The limit is a constant of the
//! configuration's type, so there are two: a short message cannot claim more than a short one may
//! have. No message may hold a list of something that takes no bytes: its length would be free.

use bincode::config::{Configuration, Fixint, Limit, LittleEndian};
use kvlane_proto::limits::{FRAME_BYTES_MAX, HELLO_FRAME_BYTES_MAX};
use kvlane_proto::{Error, ErrorKind, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::refuse;

type Config<const N: usize> = Configuration<LittleEndian, Fixint, Limit<N>>;

fn config<const N: usize>() -> Config<N> {
    bincode::config::standard().with_little_endian().with_fixed_int_encoding().with_limit::<N>()
}

/// Encodes a message; at most [`FRAME_BYTES_MAX`] bytes.
///
/// # Errors
/// [`ErrorKind::LimitExceeded`] if it is longer than a frame may be.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>> {
    let bytes = bincode::serde::encode_to_vec(message, config::<FRAME_BYTES_MAX>())
        .map_err(|e| Error::new(ErrorKind::Internal, "message cannot be encoded").caused_by(e))?;
    if bytes.len() > FRAME_BYTES_MAX {
        return Err(Error::new(ErrorKind::LimitExceeded, "message is longer than a frame may be")
            .with("found_bytes", bytes.len())
            .with("limit_bytes", FRAME_BYTES_MAX)
            .hint("split the request; long block lists shrink when they are in a row"));
    }
    Ok(bytes)
}

/// Decodes a message from exactly these bytes.
///
/// # Errors
/// [`ErrorKind::LimitExceeded`] beyond [`FRAME_BYTES_MAX`]; [`ErrorKind::Malformed`] if the bytes
/// are cut short, claim more than they have, or go on after the message. Each is counted.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    let decoded = match bytes.len() {
        0..=HELLO_FRAME_BYTES_MAX => {
            bincode::serde::decode_from_slice(bytes, config::<HELLO_FRAME_BYTES_MAX>())
        }
        _ if bytes.len() <= FRAME_BYTES_MAX => {
            bincode::serde::decode_from_slice(bytes, config::<FRAME_BYTES_MAX>())
        }
        _ => {
            return Err(refuse("oversized", ErrorKind::LimitExceeded, "message is too long")
                .with("found_bytes", bytes.len())
                .with("limit_bytes", FRAME_BYTES_MAX));
        }
    };
    match decoded {
        Ok((message, used)) if used == bytes.len() => Ok(message),
        Ok((_, used)) => Err(refuse("trailing", ErrorKind::Malformed, "bytes follow the message")
            .with("message_bytes", used)
            .with("found_bytes", bytes.len())),
        Err(e) => Err(refuse("undecodable", ErrorKind::Malformed, "message cannot be decoded")
            .with("found_bytes", bytes.len())
            .caused_by(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_fixed_width_little_endian() {
        assert_eq!(encode(&(1u8, 2u16, 3u32, true)).unwrap(), [1, 2, 0, 3, 0, 0, 0, 1]);
        assert_eq!(decode::<(u8, u16)>(&[1, 2, 0]).unwrap(), (1, 2));
    }

    #[test]
    fn trailing_missing_and_claimed_bytes_are_refused() {
        assert_eq!(decode::<u16>(&[1, 2, 3]).unwrap_err().kind(), ErrorKind::Malformed);
        assert_eq!(decode::<u32>(&[1, 2, 3]).unwrap_err().kind(), ErrorKind::Malformed);
        for claim in [u64::MAX, 1 << 40, 1 << 30, 17] {
            let bytes = claim.to_le_bytes();
            assert!(decode::<Vec<u64>>(&bytes).is_err());
            assert!(decode::<String>(&bytes).is_err());
        }
    }

    #[test]
    fn messages_longer_than_a_frame_are_refused_both_ways() {
        let long = vec![0u8; FRAME_BYTES_MAX + 1];
        assert_eq!(encode(&long).unwrap_err().kind(), ErrorKind::LimitExceeded);
        assert_eq!(decode::<Vec<u8>>(&long).unwrap_err().kind(), ErrorKind::LimitExceeded);
        let fits = vec![7u8; FRAME_BYTES_MAX - 8];
        assert_eq!(decode::<Vec<u8>>(&encode(&fits).unwrap()).unwrap(), fits);
    }
}
