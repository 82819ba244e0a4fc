//! The golden cases, on one rank and on many.

mod common;

use common::{Split, check, train};

#[test]
fn llama_gqa_on_one_rank() {
    check("llama_gqa", &train::<f32>("llama_gqa", &Split::default(), 20));
}
