//! Whether to search again where the default time showed neither a plan nor that there is none.
//!
//! Other programs may have had the processors meanwhile. So the time that the search's threads ran
//! is compared with the time that they could have run and waited for a processor. Threads that wait
//! for one another count neither way. A search that had as much of the processors as the default
//! time gives on a machine with nothing else to do is the last.

use planner::request::Request;
use planner::search::Empty;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The time for a first search, and whether others may follow.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Seconds until the answer.
    pub answer_s: f64,
    /// The search's share of them. What follows a plan has the rest.
    pub share: f64,
    /// Whether the user left the time to us.
    pub is_default: bool,
}

/// Seconds of search, with all the processors that it can use, after which it is the last one. A
/// third less than the default second: no machine is free of others at all times.
const ENOUGH_S: f64 = 2.0 / 3.0;
/// The longest search, s.
const LONGEST_S: f64 = 8.0;
/// Least share of a later search, so that all of them together end within two seconds where no
/// other program runs.
const LATER_SHARE: f64 = 0.8;

/// What the first search finds, or where it has had too little time for any answer a longer one.
/// The request's deadline moves with them.
pub fn patiently<T>(
    request: &mut Request,
    patience: Patience,
    mut find: impl FnMut(&Request) -> Result<T, Empty>,
) -> Result<T, Empty> {
    let mut share = patience.share;
    let mut search_s = share * patience.answer_s;
    loop {
        let before = request.processors.total();
        let found = find(&request.with_share(share));
        let got = request.processors.total().since(before).share();
        let is_over = !patience.is_default || request.stop.load(Ordering::Relaxed);
        match (found, next_s(search_s, got)) {
            (Err(Empty::Undecided), Some(next_s)) if !is_over => {
                (search_s, share) = (next_s, share.max(LATER_SHARE));
                request.deadline = Some(Instant::now() + Duration::from_secs_f64(next_s / share));
            }
            (found, _) => return found,
        }
    }
}

/// The length of the search after one of `search_s` that got this share of the processors that it
/// could have used; `None` after the last.
fn next_s(search_s: f64, got: f64) -> Option<f64> {
    let next_s = 2.0 * search_s;
    (search_s * got < ENOUGH_S && next_s <= LONGEST_S).then_some(next_s)
}

#[cfg(test)]
mod tests {
    use super::*;
    use planner::request::flags::Flags;
    use planner::search::search;
    use planner::until::ThreadTime;

    /// Lengths of all searches where none finds anything and each gets this share.
    fn lengths_s(first_s: f64, got: f64) -> Vec<f64> {
        std::iter::successors(Some(first_s), |&search_s| next_s(search_s, got)).collect()
    }

    #[test]
    fn a_machine_without_other_work_answers_within_two_seconds() {
        assert_eq!(lengths_s(1.0, 1.0), [1.0]);
        // With alternatives to follow, with --from, with both.
        for first_s in [0.5, 0.2, 0.1] {
            for got in [1.0, 0.9] {
                let lengths_s = lengths_s(first_s, got);
                let later_s: f64 = lengths_s[1..].iter().sum();
                assert!(first_s + later_s / LATER_SHARE < 2.0, "{lengths_s:?}");
            }
        }
    }

    #[test]
    fn a_busy_machine_gets_as_much_longer_as_it_is_busy() {
        assert_eq!(lengths_s(1.0, 0.5), [1.0, 2.0]);
        assert_eq!(lengths_s(1.0, 0.2), [1.0, 2.0, 4.0]);
        assert_eq!(lengths_s(1.0, 0.0), [1.0, 2.0, 4.0, 8.0]);
        for first_s in [0.5, 0.2, 0.1] {
            let lengths_s = lengths_s(first_s, 0.0);
            assert!(lengths_s.iter().all(|&search_s| search_s <= LONGEST_S), "{lengths_s:?}");
        }
    }

    fn request() -> Request {
        let model = "llama8b".to_owned();
        Request::new(&Flags { model, gpus: 8, ..Flags::default() }).expect("it is shipped")
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn searches_count_what_their_threads_got() {
        let request = request();
        // Some sandboxes hide it.
        let Some(before) = ThreadTime::now() else { return };
        search(&request.task(), &mut |_| {});
        let own = ThreadTime::now().expect("it said so before").since(before);
        let all = request.processors.total();
        assert!(all.ran > own.ran, "other threads ran, too: {all:?} {own:?}");
    }

    /// How many searches there are that find nothing, each of which waited for this many seconds.
    fn tries(answer_s: f64, waited_s: f64, is_default: bool) -> u32 {
        let (mut request, mut tries) = (request(), 0);
        let patience = Patience { answer_s, share: 1.0, is_default };
        let found: Result<(), _> = patiently(&mut request, patience, |request| {
            tries += 1;
            let [ran, waited] = [1.0, waited_s].map(Duration::from_secs_f64);
            request.processors.add(ThreadTime { ran, waited });
            Err(Empty::Undecided)
        });
        assert_eq!(found, Err(Empty::Undecided));
        tries
    }

    #[test]
    fn only_what_got_too_little_of_the_processors_is_searched_again() {
        assert_eq!(tries(1.0, 0.0, true), 1);
        assert_eq!(tries(1.0, 1.0, true), 2);
        assert_eq!(tries(1.0, 1e3, true), 4);
        assert_eq!(tries(1.0, 1e3, false), 1, "the user's own limit holds");
        assert_eq!(tries(LONGEST_S, 1e3, true), 1);
    }
}
