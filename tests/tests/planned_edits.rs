//! Planted edits of generated programs: none compiles, and the compiler's message names the cause.
//! What types cannot see is refused when the trainer starts.
//!
//! `tests/edits` has the messages.
#![cfg(feature = "thorough")]

#[path = "planned_edits/collectives.rs"]
mod collectives;
#[path = "planned_edits/edit.rs"]
mod edit;
#[path = "planned_edits/layers.rs"]
mod layers;
#[path = "planned_edits/messages.rs"]
mod messages;
#[path = "planned_edits/parts.rs"]
mod parts;
#[path = "planned_edits/replicas.rs"]
mod replicas;

use codegen::{RuntimeSource, generate};
use edit::{BALANCED, BLOCKS, EXPERTS, Edit, Replacement, SPLIT, WHOLE};
use meshwright_tests::crates::{build, runtime, write_all};
use meshwright_tests::golden::{inputs, planned};
use messages::{Messages, message};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

fn edits() -> impl Iterator<Item = &'static Edit> {
    [layers::EDITS, collectives::EDITS, parts::EDITS, replicas::EDITS].into_iter().flatten()
}

/// The programs' folders and trainers, which one test at a time uses.
static FOLDERS: Mutex<()> = Mutex::new(());

/// A generated program in a folder of its own.
struct Program {
    case: &'static str,
    folder: PathBuf,
    files: BTreeMap<&'static str, String>,
}

impl Program {
    fn generated(program: &str) -> Self {
        let split = match program {
            EXPERTS | BALANCED | BLOCKS => "sequence_parallel=true".to_owned(),
            whole_or_split => format!("sequence_parallel={whole_or_split}"),
        };
        let degrees = match program {
            BLOCKS => vec!["pp=1", "cp=2", "cp_style=ring", "zero_stage=3"],
            _ => vec!["pp=2", "zero_stage=0"],
        };
        let mut settings =
            vec!["tp=2", "dp=2", "schedule=1f1b", "micro_batch=1", "recompute=none", &split];
        let mut case = "llama_gqa";
        if [EXPERTS, BALANCED].contains(&program) {
            case = if program == EXPERTS { "mixtral" } else { "deepseek_v3_bias" };
            settings.extend(["ep=2", "etp=1", "moe_overlap=none"]);
        }
        settings.extend(degrees);
        let plan = planned(case, 8, &settings);
        let text = plan.to_yaml().expect("plans can be written");
        let files = generate(&plan, &text, &RuntimeSource::Path(runtime()));
        let files = files.expect("it can be trained");
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("edits-{program}"));
        Self { case, folder, files }
    }

    /// The build of the program with these replacements.
    fn built(&self, name: &str, replacements: &[Replacement]) -> Output {
        let mut files = self.files.clone();
        for (path, from, to) in replacements {
            let path = format!("src/{path}");
            let text = files.get_mut(path.as_str()).unwrap_or_else(|| panic!("{name}: no {path}"));
            let found = text.matches(from).count();
            assert_eq!(found, 1, "{name}: {path} has {found} of\n{from}");
            *text = text.replace(from, to);
        }
        write_all(&self.folder, files.iter().map(|(path, text)| (*path, text.as_str())));
        build(&self.folder, &target())
    }

    /// Starts the trainer; returns its exit code and what it says.
    fn started(&self, variables: &[(&str, &str)]) -> (Option<i32>, String) {
        let trainer = format!("debug/trainer-{}", self.case.replace('_', "-"));
        let mut trainer = Command::new(target().join(trainer))
            .args(["--steps", "1", "--data"])
            .arg(inputs(self.case).join("tokens.safetensors"))
            .envs(variables.iter().copied())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it was built");
        let begin = Instant::now();
        while trainer.try_wait().expect("it was started").is_none() {
            if begin.elapsed() > REFUSED_WITHIN {
                trainer.kill().expect("it runs");
                panic!("the trainer did not end within {REFUSED_WITHIN:?}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let output = trainer.wait_with_output().expect("it ended");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

fn target() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("unoptimized")
}

#[test]
fn planted_edits_do_not_compile() {
    let _alone = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner);
    let (messages, mut problems) = (Messages::open(), Vec::new());
    for of in [SPLIT, WHOLE, EXPERTS, BLOCKS] {
        let program = Program::generated(of);
        let unedited = program.built("no edit", &[]);
        let found = message(&unedited);
        assert!(unedited.status.success() && found.is_none(), "{}", found.unwrap_or_default());
        for edit in edits().filter(|edit| edit.program == of) {
            let build = program.built(edit.name, edit.replacements);
            problems.extend(messages.problems(edit, &build));
        }
    }
    assert!(problems.is_empty(), "{} problems\n{}", problems.len(), problems.join("\n"));
}

#[test]
fn every_kept_message_is_an_edits() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("edits");
    let files = std::fs::read_dir(folder).expect("messages are kept");
    let kept: BTreeSet<String> = files
        .map(|file| file.expect("it is there").file_name().to_string_lossy().into_owned())
        .filter(|name| name != "compiler.txt")
        .collect();
    let names: BTreeSet<String> = edits().map(|edit| format!("{}.txt", edit.name)).collect();
    assert_eq!(kept, names);
    assert_eq!(names.len(), edits().count(), "two edits have one name");
}

/// How long a trainer may take to refuse its passes.
const REFUSED_WITHIN: Duration = Duration::from_secs(20);

/// Passes of the last pipeline rank that cannot run: name, text, and what the trainer says.
const REFUSED: [(&str, &str, &str); 3] = [
    // Its second and fifth pass are swapped. In this order alone no pass lacks another.
    (
        "ranks wait for each other",
        "F F:2 F:1 BW:1 BW:0 BW:2 F:3 BW:3",
        "the pipeline ranks wait for one another: rank 0 at BW of micro-batch 0",
    ),
    ("a backward pass comes first", "4x(BW F)", "pipeline rank 1 runs BW of micro-batch 0"),
    ("an unknown word", "4x(F BX)", "pipeline rank 1: `BX"),
];

/// Edits that compile, and what the trainer says: program, name, replacement, text.
const UNSEEN: [(&str, &str, Replacement, &str); 5] = [
    (
        SPLIT,
        "a gradient is left out",
        ("layer.rs", "gradients.add(self.q.weights(&full_1, &dq));", ""),
        "self_attn.q_proj.weight: the trainer's backward pass must give its work",
    ),
    (
        SPLIT,
        "two norms have one name",
        ("layer.rs", "post_attention_layernorm", "input_layernorm"),
        "input_layernorm.weight is declared twice",
    ),
    (
        BLOCKS,
        "weights of another layer are gathered",
        (
            "only.rs",
            "            let ctx = &self.input_parameters.gather(ctx)?;",
            "            let ctx = &self.output_parameters.gather(ctx)?;",
        ),
        "weights are read that were not asked for",
    ),
    (
        BLOCKS,
        "two replicas are taken for four",
        ("layer.rs", "parameters: Parameters<Sharded<2>>", "parameters: Parameters<Sharded<4>>"),
        "replicas of these parameters, there are 2; valid: `Parameters<Sharded<2>>`",
    ),
    (
        BALANCED,
        "the load of a layer is not noted",
        ("expert_layer.rs", "self.router.note_load(ctx, &route)?;", ""),
        "e_score_correction_bias: its update needs the load of its layer",
    ),
];

#[test]
fn trainers_refuse_passes_that_cannot_run() {
    let _alone = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner);
    let program = Program::generated(SPLIT);
    for (name, passes, says) in REFUSED {
        let built = program.built(name, &[("passes.rs", "4x(F BW)", passes)]);
        assert!(built.status.success(), "{name}: {}", message(&built).unwrap_or_default());
        let (code, said) = program.started(&[]);
        assert_eq!(code, Some(2), "{name}: {said}");
        let text = std::fs::read_to_string(program.folder.join("src/passes.rs"));
        let text = text.expect("it was written");
        let before = text.split_once("PassTable::new").expect("it has a table").0;
        let line = before.matches('\n').count() + 1;
        let place = format!("error: src/passes.rs:{line}: the passes cannot run: ");
        assert!(said.starts_with(&place) && said.contains(says), "{name}: {said}");
    }
    for (of, name, edit, says) in UNSEEN {
        let program = Program::generated(of);
        let built = program.built(name, &[edit]);
        assert!(built.status.success(), "{name}: {}", message(&built).unwrap_or_default());
        let (code, said) = program.started(&[]);
        assert!(code != Some(0) && said.contains(says), "{name}: {said}");
    }
    let built = program.built("no edit", &[]);
    assert!(built.status.success());
    let launched = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "4")];
    let (code, said) = program.started(&launched);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("the plan is for 8 ranks"), "{said}");
}
