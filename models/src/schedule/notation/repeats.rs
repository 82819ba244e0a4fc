//! Repeats in a sequence of words.

use std::collections::HashMap;

/// The most words or groups that repeat together: it bounds the work for each word. Interleaved
/// schedules have the longest periods, up to two groups for each chunk. With more than 32 chunks
/// their steady state is not folded.
const MOST_PERIOD: usize = 64;

/// Groups within groups, at most: more are hard to read.
const MOST_DEPTH: u8 = 3;

/// The words with repeats written as `4xF` and `3x(F BW)`.
pub(super) fn folded(words: impl Iterator<Item = String>) -> Vec<String> {
    let mut texts = Texts::default();
    let words = words.map(|word| texts.id(word, 0)).collect();
    let folded = texts.fold(words, MOST_DEPTH);
    folded.into_iter().map(|id| texts.all[id].text.clone()).collect()
}

/// Words and groups, by number. Equal texts have the same number.
#[derive(Default)]
struct Texts {
    all: Vec<Text>,
    ids: HashMap<String, usize>,
}

/// A word or a group.
struct Text {
    text: String,
    /// Groups within groups: 0 for a word.
    depth: u8,
}

impl Texts {
    fn id(&mut self, text: String, depth: u8) -> usize {
        if let Some(&id) = self.ids.get(&text) {
            return id;
        }
        self.ids.insert(text.clone(), self.all.len());
        self.all.push(Text { text, depth });
        self.all.len() - 1
    }

    /// Finds repeats, repeats of those, and repeats within each group, none deeper than `depth`.
    fn fold(&mut self, words: Vec<usize>, depth: u8) -> Vec<usize> {
        let mut words = words;
        loop {
            let before = words.len();
            words = self.fold_once(&words, depth);
            if words.len() == before {
                return words;
            }
        }
    }

    fn fold_once(&mut self, words: &[usize], depth: u8) -> Vec<usize> {
        let best = Search::new(self, words, depth).run();
        let (mut folded, mut at) = (Vec::new(), 0);
        while at < words.len() {
            let Best { period, times, .. } = best[at];
            let repeated = &words[at..at + period];
            match times {
                1 => folded.extend(repeated),
                _ => folded.push(self.group(times, repeated, depth)),
            }
            at += period * times;
        }
        folded
    }

    fn group(&mut self, times: usize, words: &[usize], depth: u8) -> usize {
        let words = self.fold(words.to_vec(), depth - 1);
        let within = words.iter().map(|&id| self.all[id].depth).max().unwrap_or(0);
        let texts: Vec<&str> = words.iter().map(|&id| self.all[id].text.as_str()).collect();
        let text = match texts[..] {
            [word] if within == 0 => format!("{times}x{word}"),
            _ => format!("{times}x({})", texts.join(" ")),
        };
        self.id(text, within + 1)
    }
}

/// A way to write a sequence from some place on. The least is the shortest; of equally short ways
/// the one with fewer words and groups, then the one that begins with the shorter period.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Best {
    /// Bytes, with a blank behind each word or group.
    bytes: usize,
    /// Words and groups.
    items: usize,
    /// Words that are written first, and how often.
    period: usize,
    times: usize,
}

/// The search for the repeats of a sequence that make it shortest. Within a group it counts the
/// words as they are.
struct Search<'a> {
    words: &'a [usize],
    /// Of each word, bytes with a blank behind it, and depth.
    sizes: Vec<(usize, u8)>,
    /// Groups within groups, at most.
    depth: u8,
    /// For each place, the best way from there on, and one for the end.
    best: Vec<Best>,
    /// By period, how many words from here on are the same as those one period later.
    same: [usize; MOST_PERIOD + 1],
}

impl<'a> Search<'a> {
    fn new(texts: &Texts, words: &'a [usize], depth: u8) -> Self {
        let size = |&id: &usize| (texts.all[id].text.len() + 1, texts.all[id].depth);
        let sizes = words.iter().map(size).collect();
        let best = vec![Best::default(); words.len() + 1];
        Self { words, sizes, depth, best, same: [0; MOST_PERIOD + 1] }
    }

    /// The best way from each place on, found from the last place to the first.
    fn run(mut self) -> Vec<Best> {
        for at in (0..self.words.len()).rev() {
            self.best[at] = self.best_at(at);
        }
        self.best
    }

    fn best_at(&mut self, at: usize) -> Best {
        let mut best = self.way(at, 1, 1, self.sizes[at].0);
        let (mut bytes, mut deepest) = (0, 0);
        for period in 1..=MOST_PERIOD.min(self.words.len() - at - 1) {
            let (word_bytes, depth) = self.sizes[at + period - 1];
            (bytes, deepest) = (bytes + word_bytes, deepest.max(depth));
            let most = self.most_times(at, period);
            if deepest >= self.depth {
                continue;
            }
            // Once less leaves words to a repeat that begins with them: `4xF 3x(F BW)`.
            for times in most.saturating_sub(1).max(2)..=most {
                best = best.min(self.way(at, period, times, repeat_bytes(times, period, bytes)));
            }
        }
        best
    }

    /// How often the words of a period repeat from here on, at most; 1 if they do not.
    fn most_times(&mut self, at: usize, period: usize) -> usize {
        let equal = self.words[at] == self.words[at + period];
        self.same[period] = if equal { self.same[period] + 1 } else { 0 };
        1 + self.same[period] / period
    }

    /// The way that begins with a period, so many times and in `bytes`.
    fn way(&self, at: usize, period: usize, times: usize, bytes: usize) -> Best {
        let rest = self.best[at + period * times];
        Best { bytes: bytes + rest.bytes, items: 1 + rest.items, period, times }
    }
}

/// Bytes of a repeat with a blank behind it, where its words take `bytes` with blanks.
fn repeat_bytes(times: usize, period: usize, bytes: usize) -> usize {
    let brackets = if period > 1 { 2 } else { 0 };
    let digits = times.ilog10() as usize + 1;
    digits + 1 + brackets + bytes
}
