//! Sequences of several documents train like their documents apart, each in a padded sequence of
//! its own, in f64, however the sequences are split.

mod common;

use common::{Run, Split, distance, model, train_program};
use models::decisions::CpStyle;
use runtime::Error;
use runtime::data::{Packed, Sample, Samples};

/// Tokens of a sequence.
const LENGTH: usize = 32;
/// Documents of a sequence.
const DOCUMENTS: usize = 4;
/// The token that ends a document.
const END: i64 = 0;

/// Sequences of [`DOCUMENTS`] documents, each sequence cut elsewhere.
struct Stream;

impl Samples for Stream {
    fn len(&self) -> u64 {
        1 << 20
    }

    fn repeats(&self) -> bool {
        false
    }

    fn read(&self, index: u64) -> Result<Sample, Error> {
        let token = |n: u64| 1 + (index * 7919 + n * n * 31 + n * 17) % 60;
        let mut tokens: Vec<i64> = (0..=LENGTH as u64).map(|n| token(n) as i64).collect();
        // One document is a single token, and the last may end with the sequence.
        let first = index as usize % 9;
        for end in [first, first + 1, LENGTH - 1 - 3 * (index as usize % 4)] {
            tokens[end] = END;
        }
        if index.is_multiple_of(4) {
            tokens[first + 9] = END;
        }
        Ok(Sample::of_tokens(tokens))
    }
}

fn packed() -> Packed {
    Packed::new(Box::new(Stream), END)
}

/// The same documents, one a sequence, followed by tokens that predict nothing.
struct Apart;

impl Samples for Apart {
    fn len(&self) -> u64 {
        Stream.len() * DOCUMENTS as u64
    }

    fn repeats(&self) -> bool {
        false
    }

    fn read(&self, index: u64) -> Result<Sample, Error> {
        let sample = packed().read(index / DOCUMENTS as u64)?;
        let documents = sample.documents();
        assert_eq!(documents.len(), DOCUMENTS);
        let document = documents[index as usize % DOCUMENTS].clone();
        let mut tokens = sample.tokens[document.clone()].to_vec();
        let mut labels = sample.labels[document].to_vec();
        let mut each = labels.iter().zip(&tokens);
        assert!(
            each.all(|(label, token)| *token != END || *label == -1),
            "an end predicts nothing"
        );
        tokens.resize(LENGTH, 1);
        labels.resize(LENGTH, -1);
        Ok(Sample { tokens, labels, starts: Vec::new() })
    }
}

fn assert_same(what: &str, one: &Run, other: &Run) {
    for (a, b) in one.losses.iter().zip(&other.losses) {
        assert!((a - b).abs() < 1e-12 * b.abs(), "{what}: loss {a}, {b} apart");
    }
    for (name, (_, values)) in &one.gradients {
        let away = distance(values, &other.gradients[name].1);
        assert!(away < 1e-11, "{what}: gradient of {name} is {away:e} away");
    }
}

#[test]
fn documents_of_a_sequence_train_as_if_apart() {
    for case in ["llama_gqa", "gpt2", "gemma2"] {
        let one = Split::default();
        let mut apart = one.program(&model(case));
        apart.micro_batch *= DOCUMENTS;
        let apart = train_program::<f64>(&apart, &one, 2, Some(case), &Apart);
        let whole = train_program::<f64>(&one.program(&model(case)), &one, 2, Some(case), &Stream);
        assert!((whole.losses[0] - apart.losses[0]).abs() > 1e-6, "{case}: documents matter");

        let cp = |cp, cp_style| Split { cp, cp_style, micro_batch: 4, ..one };
        let splits = [
            one,
            cp(4, CpStyle::Ring),
            cp(2, CpStyle::Zigzag),
            cp(4, CpStyle::AllGather),
            cp(2, CpStyle::Ulysses),
            Split { cp_ulysses: 2, ..cp(4, CpStyle::Hybrid) },
            Split { tp: 2, pp: 2, sequence_parallel: true, micro_batch: 2, ..one },
            Split { dp: 2, zero: 3, micro_batch: 2, ..one },
        ];
        for split in splits {
            let program = split.program(&model(case));
            let run = train_program::<f64>(&program, &split, 2, Some(case), &packed());
            assert_same(&format!("{case}, {split:?}"), &run, &apart);
        }
    }
}
