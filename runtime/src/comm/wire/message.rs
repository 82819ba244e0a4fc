//! Packets of a wire and their encoding.

use crate::comm::Dtype;

/// Address of a mailbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Address {
    pub group: u64,
    /// Sender's rank within the group.
    pub from: usize,
    /// Tag of a message, or number of a collective.
    pub stream: u64,
}

/// What one rank sends another for a call.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Message {
    pub address: Address,
    /// What both calls must agree on.
    pub signature: String,
    /// The sender's call and where it was made.
    pub call: String,
    pub dtype: Dtype,
    pub bytes: Vec<u8>,
}

/// Everything that processes send each other.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Packet {
    Message(Message),
    /// The sender has ended; with the failure that ended it, if one did. Others may learn of it
    /// from here before the rank that gave up tells them.
    Gone(Option<Failure>),
    /// The sender gave up.
    Abort {
        reason: String,
    },
}

/// The world rank that gave up, and why.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Failure {
    pub rank: usize,
    pub reason: String,
}

impl Packet {
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Message(message) => message.encode(),
            Self::Gone(None) => vec![1],
            Self::Gone(Some(Failure { rank, reason })) => {
                [&[1], &number(*rank as u64)[..], reason.as_bytes()].concat()
            }
            Self::Abort { reason } => [&[2], reason.as_bytes()].concat(),
        }
    }

    /// `None` for bytes that [`Self::encode`] does not produce.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, mut rest) = bytes.split_first()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match kind {
            0 => Message::decode(rest).map(Self::Message),
            1 if rest.is_empty() => Some(Self::Gone(None)),
            1 => {
                let rank = take(&mut rest)? as usize;
                Some(Self::Gone(Some(Failure { rank, reason: text(rest) })))
            }
            2 => Some(Self::Abort { reason: text(rest) }),
            _ => None,
        }
    }
}

impl Message {
    fn encode(&self) -> Vec<u8> {
        let Self { address, signature, call, dtype, bytes } = self;
        let dtype = Dtype::ALL.iter().position(|of| of == dtype).unwrap_or_default();
        let numbers = [
            address.group,
            address.from as u64,
            address.stream,
            dtype as u64,
            signature.len() as u64,
            call.len() as u64,
        ];
        let mut all = vec![0];
        numbers.iter().for_each(|&n| all.extend(number(n)));
        [signature.as_bytes(), call.as_bytes(), bytes].iter().for_each(|part| all.extend(*part));
        all
    }

    fn decode(mut rest: &[u8]) -> Option<Self> {
        let mut next = || take(&mut rest);
        let (group, from, stream) = (next()?, next()? as usize, next()?);
        let (dtype, signature, call) = (next()? as usize, next()? as usize, next()? as usize);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (signature, rest) = rest.split_at_checked(signature)?;
        let (call, bytes) = rest.split_at_checked(call)?;
        Some(Self {
            address: Address { group, from, stream },
            signature: text(signature),
            call: text(call),
            dtype: *Dtype::ALL.get(dtype)?,
            bytes: bytes.to_vec(),
        })
    }
}

fn number(n: u64) -> [u8; 8] {
    n.to_le_bytes()
}

fn take(rest: &mut &[u8]) -> Option<u64> {
    let (first, behind) = rest.split_first_chunk::<8>()?;
    *rest = behind;
    Some(u64::from_le_bytes(*first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_wire() {
        let message = Message {
            address: Address { group: 7, from: 3, stream: 1 << 63 },
            signature: "barrier".to_owned(),
            call: "barrier at x.rs:1".to_owned(),
            dtype: Dtype::I64,
            bytes: vec![1, 2, 3],
        };
        let message = Packet::Message(message);
        assert_eq!(Packet::decode(&message.encode()[..4]), None);
        let reason = || "no space".to_owned();
        let failed = Packet::Gone(Some(Failure { rank: 3, reason: reason() }));
        for packet in [message, Packet::Gone(None), failed, Packet::Abort { reason: reason() }] {
            assert_eq!(Packet::decode(&packet.encode()), Some(packet));
        }
        assert_eq!(Packet::decode(&[1, 0]), None);
        assert_eq!(Packet::decode(&[9]), None);
        assert_eq!(Packet::decode(&[]), None);
    }
}
