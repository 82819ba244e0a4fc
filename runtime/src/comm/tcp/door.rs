//! Where a rank lets others in while a run starts: all who knock are served side by side, so that nobody who is silent
//! holds up the others, and only ranks with the run's key come in.

use super::hello::{Clock, HELLO_BYTES, Hello, Key, PATIENCE, challenge, nonce, prove};
use super::{MeetingError, io_error};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How often the door is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(3);

/// How many may stand at the door; the one that has stood there longest makes room.
const MOST_WAITING: usize = 256;

/// Who has connected and not yet said who it is.
struct Waiting {
    stream: TcpStream,
    nonce: [u8; 32],
    bytes: [u8; HELLO_BYTES],
    filled: usize,
    since: Instant,
}

/// A rank that has come in.
pub(super) struct Guest {
    pub rank: usize,
    /// Where it listens; port 0 where it does not.
    pub address: SocketAddr,
    pub stream: TcpStream,
}

/// A listener that only ranks of this run pass.
pub(super) struct Door {
    listener: TcpListener,
    rank: usize,
    size: usize,
    key: Key,
    waiting: Vec<Waiting>,
    /// Who was turned away last, and how many were.
    pub refused: Option<(SocketAddr, usize)>,
}

impl Door {
    pub fn open(
        address: SocketAddr,
        rank: usize,
        size: usize,
        key: Key,
    ) -> Result<Self, MeetingError> {
        let wrong = || io_error(format!("cannot listen at {address}"));
        let listener = TcpListener::bind(address).map_err(wrong())?;
        listener.set_nonblocking(true).map_err(wrong())?;
        Ok(Self { listener, rank, size, key, waiting: Vec::new(), refused: None })
    }

    /// Where it is.
    pub fn address(&self) -> Result<SocketAddr, MeetingError> {
        self.listener.local_addr().map_err(io_error("cannot listen"))
    }

    /// Waits a moment for whoever comes in next; nothing where nobody does.
    pub fn next(&mut self, clock: &Clock<'_>) -> Result<Vec<Guest>, MeetingError> {
        std::thread::sleep(LOOK_EVERY.min(clock.left()));
        self.accept();
        let mut guests = Vec::new();
        for mut waiting in std::mem::take(&mut self.waiting) {
            match waiting.read() {
                Ok(true) => guests.extend(self.admit(&waiting)?),
                Ok(false) if waiting.since.elapsed() < PATIENCE => self.waiting.push(waiting),
                Ok(false) | Err(_) => self.turn_away(&waiting.stream),
            }
        }
        Ok(guests)
    }

    /// Takes the connections that have come. A failure to take one is no reason to end a run: it is tried again.
    fn accept(&mut self) {
        for _ in 0..MOST_WAITING {
            let Ok((stream, _)) = self.listener.accept() else { return };
            let Ok(waiting) = Waiting::new(stream) else { continue };
            if self.waiting.len() >= MOST_WAITING {
                let longest = self.waiting.remove(0);
                self.turn_away(&longest.stream);
            }
            self.waiting.push(waiting);
        }
    }

    /// Lets in who has said who it is and proved it.
    fn admit(&mut self, waiting: &Waiting) -> Result<Option<Guest>, MeetingError> {
        let hello = Hello::checked(&waiting.bytes, &self.key, &waiting.nonce);
        let Some(hello) = hello.filter(|hello| hello.to == self.rank as u64) else {
            self.turn_away(&waiting.stream);
            return Ok(None);
        };
        if hello.size != self.size as u64 || hello.from >= hello.size {
            let (rank, theirs, ours) = (hello.from, hello.size, self.size);
            let problem =
                format!("a process says that it is rank {rank} of {theirs}; this world has {ours}");
            return Err(MeetingError::Stranger(problem));
        }
        // It has left where this fails, and tries again.
        Ok(waiting.welcome(&self.key, hello).ok())
    }

    fn turn_away(&mut self, stream: &TcpStream) {
        if let Ok(address) = stream.peer_addr() {
            self.refused = Some((address, self.refused.map_or(0, |(_, count)| count) + 1));
        }
    }
}

impl Waiting {
    fn new(stream: TcpStream) -> io::Result<Self> {
        let nonce = nonce()?;
        stream.set_nonblocking(true)?;
        // A new connection has room for this.
        (&stream).write_all(&challenge(&nonce))?;
        Ok(Self { stream, nonce, bytes: [0; HELLO_BYTES], filled: 0, since: Instant::now() })
    }

    /// Reads what is there; says whether it is the whole hello.
    fn read(&mut self) -> io::Result<bool> {
        while self.filled < HELLO_BYTES {
            match self.stream.read(&mut self.bytes[self.filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn welcome(&self, key: &Key, hello: Hello) -> io::Result<Guest> {
        let stream = self.stream.try_clone()?;
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        prove(&stream, key, &self.nonce, &self.bytes)?;
        let port = u16::try_from(hello.port).map_err(io::Error::other)?;
        let address = SocketAddr::new(stream.peer_addr()?.ip(), port);
        Ok(Guest { rank: hello.from as usize, address, stream })
    }
}
