//! Collectives as straight lines, for bounds.

use super::cost_cache::CostCache;
use crate::cost::collective::{self, Collective};
use models::mesh::GroupShape;

impl CostCache<'_> {
    /// Linear lower bound on the time of a collective of up to `MOST_BYTES`: intercept, s, and
    /// slope, s a byte.
    ///
    /// Times are sampled at sizes a factor `STEP` apart. Between two samples the time is at least
    /// the smaller's and the bytes are at most the larger's, because collectives never get faster
    /// with size. The slope is a little less than the least time a byte, so that the extra time of
    /// small sizes goes into the intercept.
    pub fn collective_line(&self, op: Collective, group: &GroupShape) -> (f64, f64) {
        const MOST_BYTES: f64 = 1e13;
        const STEP: f64 = 1.03;
        const SLOPE: f64 = 0.98;
        if group.size() == 1 {
            return (0.0, 0.0);
        }
        if let Some(&known) = self.lines.borrow().get(&op).and_then(|known| known.get(group)) {
            return known;
        }
        let sizes = std::iter::successors(Some(1.0), |bytes| Some(bytes * STEP));
        let times: Vec<(f64, f64)> = sizes
            .take_while(|&bytes| bytes < MOST_BYTES)
            .map(|bytes| (bytes * STEP, collective::time_s(self.cluster, op, bytes, group)))
            .collect();
        let least = |value: &dyn Fn(f64, f64) -> f64| {
            times.iter().map(|&(bytes, s)| value(bytes, s)).fold(f64::INFINITY, f64::min)
        };
        let slope = SLOPE * least(&|bytes, s| s / bytes);
        let line = (least(&|bytes, s| s - slope * bytes).max(0.0), slope);
        self.lines.borrow_mut().entry(op).or_default().insert(group.clone(), line);
        line
    }
}
