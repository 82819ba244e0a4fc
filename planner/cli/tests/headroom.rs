//! Plans leave a part of each device's memory free; estimates warn where a configuration would not.

mod cli_common;

use cli_common::{plan, scratch};

/// Fills 99.4 % of a device, whatever is left open.
const FULL: &str = "--model llama8b --gpus 8 --set tp=1 --set pp=1 --set cp=1 --set micro_batch=2 --set zero_stage=1 \
                    --set offload=none --set fused_loss=false";
const FREE: &str = "--model llama8b --gpus 8 --set tp=1 --set pp=1 --set cp=1 --set micro_batch=2";

#[test]
fn a_plan_keeps_the_headroom() {
    for (words, share) in [("", 0.05), (" --headroom 0", 0.0), (" --headroom 12.5", 0.125)] {
        let path = scratch("headroom.yaml");
        let json = plan(&format!("{FREE}{words} --json -o {}", path.display())).json();
        let (peak, hbm) = (json["predicted"]["peak_memory_bytes"].as_f64().unwrap(), 85.5e9);
        assert!(peak <= (1.0 - share) * hbm, "{words}: {peak}");
        assert_eq!(json["headroom"], share, "{words}");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(&format!("  headroom: {share}")), "{text}");
        assert_eq!(plan(&format!("check {}", path.display())).code, 0, "{words}");
    }
    let screen = plan(FREE).out;
    assert!(screen.contains(" GB of 85.5 GB on pipeline rank 0, the fullest (5 % kept free); "));
}

/// A configuration that fits only without the headroom gives no plan, but is feasible.
#[test]
fn what_fits_without_headroom_alone_is_warned_of() {
    let none = plan(FULL);
    assert_eq!(none.code, 3, "{none:?}");
    assert!(none.err.contains("fits     --headroom 0: "), "{none:?}");
    let full = plan(&format!("{FULL} --headroom 0"));
    assert!(full.code == 0 && full.out.contains("warning    memory is 99.4 % full"), "{full:?}");
    assert!(!full.out.contains("headroom kept"), "{full:?}");
    let estimate = plan(&format!("estimate {FULL} --json")).json();
    assert_eq!(estimate["feasible"], true);
    assert_eq!(estimate["warnings"].as_array().unwrap().len(), 1);
    let over = plan(&format!("estimate {FULL} --set recompute=none --json")).json();
    assert_eq!(over["feasible"], false);
}

/// A plan that does not keep its headroom is refused.
#[test]
fn a_check_knows_the_headroom() {
    let path = scratch("kept.yaml");
    assert_eq!(plan(&format!("{FREE} -o {}", path.display())).code, 0);
    let text = std::fs::read_to_string(&path).unwrap();
    for (headroom, field) in [("0.5", "memory.total together"), ("0.95", "inputs.headroom")] {
        let edited = scratch("not_kept.yaml");
        let with = text.replacen("  headroom: 0.05", &format!("  headroom: {headroom}"), 1);
        assert_ne!(with, text);
        std::fs::write(&edited, with).unwrap();
        let run = plan(&format!("check {}", edited.display()));
        assert!(run.code == 2 && run.out.contains(field), "{run:?}");
    }
}

#[test]
fn a_headroom_that_cannot_be_is_refused() {
    for headroom in ["-1", "91", "nan", "inf"] {
        let run = plan(&format!("{FREE} --headroom={headroom}"));
        assert_eq!(run.code, 2, "{run:?}");
        assert!(run.err.contains("--headroom cannot be") && run.err.contains("0 to 90"), "{run:?}");
    }
}
