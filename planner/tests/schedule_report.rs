//! Output of `plan schedule`: drawings, orders and JSON.

use models::schedule::{ScheduleName, VocabPasses};
use planner::simulate::{MemoryRequest, PairTime, Report, Request, VocabRequest};

fn request(schedule: ScheduleName) -> Request {
    Request {
        schedule,
        stages: 2,
        micro_batches: 4,
        chunks: 1,
        forward: 1.0,
        backward: 1.0,
        weight: 1.0,
        latency: 0.0,
        vocab: None,
        pair: PairTime::Sum,
        memory: MemoryRequest::default(),
    }
}

#[test]
fn a_drawing_shows_every_pass_to_scale() {
    let (_, timeline) = request(ScheduleName::OneFOneB).run().unwrap();
    // 15 units in 30 columns: a forward is two columns wide, a backward four.
    let expected = "\
p0 F0F1....B0==F2B1==F3B2==..B3==
p1 ..F0B0==F1B1==F2B2==F3B3==....
";
    assert_eq!(timeline.draw(33), expected);
}

#[test]
fn odd_chunks_are_drawn_in_lower_case() {
    let chunked = Request { chunks: 2, ..request(ScheduleName::LoopedBfs) };
    let (_, timeline) = chunked.run().unwrap();
    // 13.5 units in 54 columns: a chunk's forward is two columns wide.
    let expected = "\
p0 F0F1F2F3f0f1f2f3......b3==b2==b1==b0==B3==B2==B1==B0==
p1 ..F0F1F2F3f0f1f2f3b3==b2==b1==b0==B3==B2==B1==B0==....
";
    assert_eq!(timeline.draw(57), expected);
}

#[test]
fn drawings_fit_any_width() {
    let vocab = VocabRequest {
        passes: VocabPasses::One,
        first: 0.25,
        last: 0.25,
        look_up: 0.0,
        look_up_backward: 0.0,
    };
    let wide = Request { stages: 12, micro_batches: 40, ..request(ScheduleName::OneFOneB) };
    let wide = Request { vocab: Some(vocab), ..wide };
    let (_, timeline) = wide.run().unwrap();
    for width in [0, 1, 5, 80, 1000] {
        let drawn = timeline.draw(width);
        assert_eq!(drawn.lines().count(), 12);
        assert!(drawn.lines().all(|line| line.len() == width.max(5)), "{drawn}");
    }
}

#[test]
fn json_has_the_documented_names() {
    let (schedule, timeline) = request(ScheduleName::OneFOneB).run().unwrap();
    let json = serde_json::to_string(&Report::new(&timeline)).unwrap();
    let expected = "{\"makespan\":15.0,\"stage_time\":15.0,\"bubble_fraction\":0.19999999999999996,\
                    \"peak_activations\":[2.0,1.0],\"peak_activations_until_w\":[2.0,1.0]}";
    assert_eq!(json, expected);
    let orders = Report::new(&timeline).with_orders(&schedule).orders.unwrap();
    assert_eq!(orders[1].join(" "), "F0@1 BW0@1 F1@1 BW1@1 F2@1 BW2@1 F3@1 BW3@1");
}

#[test]
fn naive_runs_the_batch_as_one() {
    let (_, timeline) = request(ScheduleName::Naive).run().unwrap();
    assert_eq!((timeline.makespan_s, timeline.bubble_fraction()), (24.0, 0.5));
    assert_eq!(timeline.peak_activations, [4.0, 4.0]);
}

#[test]
fn requests_that_cannot_be_met_say_what_can() {
    let error = |request: Request| request.build().unwrap_err().to_string();
    let ten = Request { stages: 4, micro_batches: 10, ..request(ScheduleName::Interleaved1F1B) };
    assert_eq!(
        error(ten),
        "interleaved_1f1b needs at least 2 chunks per pipeline rank: 1; 2 would do"
    );
    assert_eq!(
        error(Request { chunks: 2, ..ten }),
        "interleaved_1f1b needs micro-batches divisible by stages: 10 with p = 4; 8 or 12 would do"
    );
    let vocab = VocabRequest {
        passes: VocabPasses::Two,
        first: 0.25,
        last: 0.25,
        look_up: 0.0,
        look_up_backward: 0.0,
    };
    assert_eq!(
        error(Request { vocab: Some(vocab), chunks: 2, ..request(ScheduleName::Chimera) }),
        "chimera has no place for vocabulary passes (parallel_2); valid: gpipe, 1f1b, interleaved_1f1b, \
         looped_bfs, zb_h1, zb_h2, interleaved_zb, v_half, v_min, zb_auto, zb_v, v_1f1b, dualpipe_v"
    );
}
