//! Timelines drawn in plain characters.

use super::timeline::{Span, Timeline, runs_beside};
use models::schedule::{Pass, PassKind};
use std::iter::repeat_n;

/// Character for idle time.
const IDLE: char = '.';

/// Explains the characters of [`Timeline::draw`].
pub const LEGEND: &str = "F forward, B backward, W weight gradients, \
    S U T output layer, I J input layer, - = ~ the same goes on, . idle; \
    lower case: odd chunks; numbers: micro-batches; & runs together with what follows";

impl Timeline {
    /// Whether there is a column for each pass of a rank. Otherwise they lie over one another.
    pub fn fits(&self, columns: usize) -> bool {
        self.most_passes() <= columns
    }

    fn most_passes(&self) -> usize {
        self.spans.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// At most so many columns and pipeline ranks, of the whole timeline or of its start and its
    /// end.
    pub fn drawing(&self, columns: usize, most_ranks: usize, whole: bool) -> String {
        let drawn = if whole { self.draw(columns) } else { self.both_ends(columns) };
        let mut text: String = drawn.split_inclusive('\n').take(most_ranks).collect();
        let more = self.spans.len().saturating_sub(most_ranks);
        if more > 0 {
            text += &format!("... {more} more ranks\n");
        }
        text
    }

    fn both_ends(&self, columns: usize) -> String {
        // Leaves room for a letter and one or two digits of each pass.
        let (end, half) = (self.makespan_s, columns / 2 - 2);
        let passes = self.most_passes().max(half);
        let length = end * half as f64 / (3 * passes) as f64;
        let start = self.between(0.0, length).draw(half);
        let last = self.between(end - length, end).draw(half);
        let cells = |line: &str| {
            line.split_once(' ').map_or("", |(_, cells)| cells.trim_start()).to_owned()
        };
        let both = start.lines().zip(last.lines());
        both.map(|(start, last)| format!("{start} // {}\n", cells(last))).collect()
    }

    /// One line a pipeline rank, at most `width` columns. Each pass is drawn from its start to its
    /// end: its letter, its micro-batch if there is room, and fill characters. See [`LEGEND`].
    pub fn draw(&self, width: usize) -> String {
        let most = self.spans.len().saturating_sub(1).to_string().len();
        let columns = width.saturating_sub(most + 2).max(1);
        let line = |(rank, spans): (usize, &Vec<Span>)| {
            let cells: String = self.draw_rank(spans, columns).into_iter().collect();
            format!("p{rank:<most$} {cells}\n")
        };
        self.spans.iter().enumerate().map(line).collect()
    }

    fn draw_rank(&self, spans: &[Span], columns: usize) -> Vec<char> {
        let mut cells = vec![IDLE; columns];
        let column = |time_s: f64| (time_s / self.makespan_s * columns as f64).round() as usize;
        // A look-up in the input layer that takes no time gets no column.
        let input = |kind: PassKind| matches!(kind, PassKind::IF | PassKind::IB);
        let seen = |span: &&Span| !(input(span.pass.kind) && span.start_s == span.end_s);
        let spans: Vec<&Span> = spans.iter().filter(seen).collect();
        for (n, &span) in spans.iter().enumerate() {
            let start = column(span.start_s).min(columns - 1);
            let end = column(span.end_s).clamp(start + 1, columns);
            let is_second = n > 0 && runs_beside(spans[n - 1], span);
            let is_first = spans.get(n + 1).is_some_and(|next| runs_beside(span, next));
            let middle = start + (end - start).div_ceil(2);
            if is_second {
                cells.splice(middle..end, pass_text(span.pass, end - middle));
            } else if is_first {
                cells.splice(start..middle, pass_text(span.pass, middle - start));
                cells[middle - 1] = if middle - start > 1 { '&' } else { cells[middle - 1] };
            } else {
                cells.splice(start..end, pass_text(span.pass, end - start));
            }
        }
        cells
    }
}

/// The pass's letter, its micro-batch if it fits, and fill: exactly `width` characters.
fn pass_text(pass: Pass, width: usize) -> impl Iterator<Item = char> {
    let (mark, fill) = mark_and_fill(pass.kind);
    let mark = if pass.chunk % 2 == 1 { mark.to_ascii_lowercase() } else { mark };
    let number = pass.micro_batch.to_string();
    let number = if number.len() < width { number } else { String::new() };
    let filled = width.saturating_sub(1 + number.len());
    let mark = (width > 0).then_some(mark);
    mark.into_iter().chain(number.chars().collect::<Vec<_>>()).chain(repeat_n(fill, filled))
}

fn mark_and_fill(kind: PassKind) -> (char, char) {
    match kind {
        PassKind::F => ('F', '-'),
        PassKind::B | PassKind::BW => ('B', '='),
        PassKind::W => ('W', '~'),
        PassKind::S => ('S', '+'),
        PassKind::S2 => ('U', '+'),
        PassKind::T => ('T', '+'),
        PassKind::IF => ('I', '+'),
        PassKind::IB => ('J', '+'),
    }
}
