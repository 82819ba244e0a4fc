//! The communicator of one rank.

use super::{Call, CommError, Communicator, Kind, Payload, Pending, Stats};

/// A single rank: every collective returns what it was given.
#[derive(Clone, Debug, Default)]
pub struct Solo {
    name: String,
    stats: Stats,
}

impl Solo {
    /// A world of one rank.
    pub fn new() -> Self {
        Self { name: "world".to_owned(), stats: Stats::default() }
    }
}

struct Done(Payload);

impl Pending for Done {
    fn wait(self: Box<Self>) -> Result<Payload, CommError> {
        Ok(self.0)
    }
}

impl Communicator for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn group(&self) -> &str {
        &self.name
    }

    fn stats(&self) -> &Stats {
        &self.stats
    }

    fn carries_devices(&self) -> bool {
        true
    }

    fn not_recordable(&self) -> Option<&'static str> {
        None
    }

    fn start(&self, call: Call, payload: Payload) -> Result<Box<dyn Pending>, CommError> {
        match call.kind {
            Kind::Send { .. } | Kind::Recv { .. } => Err(CommError::Invalid {
                call: call.to_string(),
                reason: "there is only one rank".to_owned(),
            }),
            _ => {
                self.stats.count(&self.name, &call, payload.len());
                Ok(Box::new(Done(payload)))
            }
        }
    }

    fn split(
        &self,
        name: &str,
        _color: usize,
        _key: usize,
    ) -> Result<Box<dyn Communicator>, CommError> {
        Ok(Box::new(Self { name: name.to_owned(), stats: self.stats.clone() }))
    }

    fn abort(&self, _reason: &str) {}
}
