//! When a search has to answer: limits of time, and Ctrl-C.

use crate::args::LimitArgs;
use crate::failure::Failure;
use models::input::InputError;
use models::text::figure;
use planner::request::Request;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The seconds of `--time-limit`; `None` with `--prove`.
pub fn seconds(limit: LimitArgs, default_s: f64) -> Result<Option<f64>, InputError> {
    if limit.prove {
        return Ok(None);
    }
    let seconds = limit.time_limit.unwrap_or(default_s);
    if !(0.0..=1e6).contains(&seconds) {
        let error = InputError::new(format!("--time-limit cannot be {}", figure(seconds)));
        return Err(error.help("valid: 0 to 1000000 seconds"));
    }
    Ok(Some(seconds))
}

/// When to answer.
pub fn deadline(limit: LimitArgs, default_s: f64) -> Result<Option<Instant>, InputError> {
    let limit = seconds(limit, default_s)?.map(Duration::from_secs_f64);
    Ok(limit.map(|limit| Instant::now() + limit))
}

/// Makes Ctrl-C stop the searches of a request, which return the best they know. A second Ctrl-C
/// ends the program.
pub fn stop_at_interrupt(request: &Request) -> Result<(), Failure> {
    let stop = Arc::clone(&request.stop);
    let handler = move || {
        if stop.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    };
    ctrlc::set_handler(handler).map_err(|error| anyhow::Error::new(error).into())
}
