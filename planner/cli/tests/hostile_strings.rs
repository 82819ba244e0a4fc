//! Hostile texts in every text field of a plan, a model, a cluster and in paths. Each is refused
//! with a message that cannot control a terminal, or stays plain text in all that is printed and
//! generated.

mod cli_common;

use cli_common::{Run, plan, run_plan, scratch};
use codegen::{RuntimeSource, render};
use models::check::check;
use models::input::{InputError, Source};
use models::plan::Plan;
use models::program::Program;
use models::text::is_hidden;
use proc_macro2::{TokenStream, TokenTree};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A field that is both valid TOML and valid Rust: a dependency whose build script would run when
/// the trainer is built.
const EXPLOIT: &str = "meshwright 0.1.0\n#![doc = \"\n[target.'cfg(unix)'.dependencies]\nevil = {path = '/somewhere/evil'}\n#\"] //";

/// Texts with a meaning for a terminal, YAML, TOML, Rust, Markdown, a shell, a template or a path.
fn hostile() -> Vec<String> {
    let long = "x".repeat(100_000);
    let texts = [
        EXPLOIT,
        "\u{1b}[2J\u{1b}[31mred",
        "\u{1b}]0;title\u{7}",
        "\u{1b}]52;c;ZXZpbA==\u{7}",
        "\u{9b}31m",
        "a\nfn evil() { std::process::exit(3) }",
        "a\n[dependencies]\nevil = \"1\"",
        "a\r[build]",
        "a\r\n*/ fn evil() {} /*",
        "*/ fn evil() {} /*",
        "\"; std::process::exit(3); \"",
        "\"#; std::process::exit(3); r#\"",
        "\\\"; evil(); //",
        "\\",
        "\\u{0a}",
        "{{ tool }}",
        "{% for i in range(end=9) %}x{% endfor %}",
        "{# comment #}",
        "{{ __tera_context }}",
        "${IFS}",
        "$(touch evil)",
        "`touch evil`",
        "'; touch evil; '",
        "a && touch evil",
        "a | b || c",
        "--config=evil",
        "\0",
        "a\0b",
        "\u{feff}a",
        "\u{202e}evil\u{202c}",
        "\u{2066}evil\u{2069}",
        "a\u{200b}b\u{200d}c\u{2060}d",
        "a\u{2028}fn evil() {}\u{2029}",
        "a\u{85}b\u{b}c\u{c}d",
        "\u{e0041}\u{e0042}",
        "../../../etc/passwd",
        "/etc/passwd",
        "C:\\con\\..",
        "~/.ssh/id_rsa",
        "<script>alert(1)</script>",
        "[click](javascript:alert(1))",
        "```rust\nfn evil() {}\n```",
        "# heading",
        "//! doc",
        "r#\"",
        "'a",
        "null",
        "",
        "   ",
        "*anchor &x !tag : - ? |",
        "\u{fffd}\u{ffff}",
        "é模😀 שלום",
        long.as_str(),
    ];
    texts.map(str::to_owned).to_vec()
}

/// Every free text field of a plan.
const PLAN_FIELDS: [&str; 8] = [
    "/tool",
    "/inputs/cluster/name",
    "/inputs/cluster/device",
    "/inputs/model/name",
    "/inputs/settings/0",
    "/inputs/model/assumptions/0",
    "/inputs/model/numerics/unknown/0",
    "/order/0",
];

fn harmless() -> Value {
    let path = scratch("harmless.yaml");
    let words = "--model tiny --cluster laptop --gpus 2 --set tp=2 -o";
    let run = plan(&format!("{words} {}", path.display()));
    assert_eq!(run.code, 0, "{run:?}");
    let plan = Plan::read(&Source::open(&path).unwrap()).unwrap();
    serde_json::to_value(plan).unwrap()
}

/// The plan with a text in one field.
fn with(plan: &Value, field: &str, text: &str) -> Value {
    let mut plan = plan.clone();
    let (list, first) = field.rsplit_once('/').unwrap();
    if first == "0" {
        let root = list.rsplit_once('/').unwrap();
        let holder = if root.0.is_empty() { &mut plan } else { plan.pointer_mut(root.0).unwrap() };
        holder[root.1] = json!([text]);
    } else {
        *plan.pointer_mut(field).unwrap() = json!(text);
    }
    plan
}

/// As JSON, which is also YAML, with hidden characters verbatim or escaped.
fn written(value: &Value) -> [String; 2] {
    let raw = serde_json::to_string(value).unwrap();
    let escaped = |c: char| match c.is_ascii() {
        true => c.to_string(),
        false => c.encode_utf16(&mut [0; 2]).iter().map(|half| format!("\\u{half:04x}")).collect(),
    };
    let ascii = raw.chars().map(escaped).collect();
    [raw, ascii]
}

/// Asserts that a message has no hidden characters and fits on a screen.
fn assert_shown(text: &str, of: &str) {
    let hidden = text.chars().find(|&c| is_hidden(c) && c != '\n');
    assert_eq!(hidden, None, "{of:?}: {text:?}");
    assert!(text.len() < 20_000, "{of:?}: {} bytes", text.len());
}

fn assert_refused_well(error: &InputError, of: &str) {
    assert_shown(&error.to_string(), of);
    assert!(error.help.is_some(), "{of:?}: {error}");
}

fn read(text: &str) -> Result<Plan, InputError> {
    Plan::read(&Source::from_bytes("plan.yaml", text.as_bytes().to_vec())?)
}

/// The tokens of a Rust file, with all string literals and doc comments made equal.
fn tokens(text: &str) -> String {
    fn same(stream: TokenStream) -> TokenStream {
        let one = |tree: TokenTree| match tree {
            TokenTree::Group(group) => {
                proc_macro2::Group::new(group.delimiter(), same(group.stream())).into()
            }
            TokenTree::Literal(literal) if literal.to_string().contains('"') => {
                proc_macro2::Literal::string("").into()
            }
            other => other,
        };
        stream.into_iter().map(one).collect()
    }
    same(text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"))).to_string()
}

/// The keys of a TOML table, by path.
fn keys(table: &dyn toml_edit::TableLike, at: &str, found: &mut Vec<String>) {
    for (key, item) in table.iter() {
        let path = format!("{at}.{key}");
        if let Some(inner) = item.as_table_like() {
            keys(inner, &path, found);
        }
        found.push(path);
    }
}

fn manifest(text: &str) -> toml_edit::Document<String> {
    toml_edit::Document::parse(text.to_owned()).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// The parts of generated files that must not depend on the texts in them.
fn structure(files: &BTreeMap<&'static str, String>) -> BTreeMap<&'static str, String> {
    let of = |(&path, text): (&&'static str, &String)| {
        let structure = match path {
            "Cargo.toml" => {
                let mut found = vec![];
                keys(manifest(text).as_table(), "", &mut found);
                format!("{} lines: {found:?}", text.lines().count())
            }
            path if path.ends_with(".rs") => {
                syn::parse_file(text).unwrap_or_else(|error| panic!("{path}: {error}\n{text}"));
                tokens(text)
            }
            "launch/mpi.sh" => shell_with_plain_package(text),
            "README.md" => format!("{} lines", text.lines().count()),
            _ => text.clone(),
        };
        (path, structure)
    };
    files.iter().filter(|(path, _)| **path != "plan.yaml").map(of).collect()
}

fn shell_with_plain_package(text: &str) -> String {
    let (before, rest) = text.split_once("trainer-").unwrap_or_else(|| panic!("{text}"));
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    format!("{before}{}", rest.trim_start_matches(plain))
}

fn rendered(plan: &Value, runtime: &RuntimeSource) -> BTreeMap<&'static str, String> {
    let mut plan: Plan = serde_json::from_value(plan.clone()).unwrap();
    // The order decides what runs, and is checked separately.
    plan.order.clear();
    let unknown = std::mem::take(&mut plan.inputs.model.numerics.unknown);
    let program = Program::of(&plan).unwrap();
    plan.inputs.model.numerics.unknown = unknown;
    render(&plan, &program, "text", runtime).unwrap()
}

fn runtime() -> RuntimeSource {
    RuntimeSource::Path("../runtime".to_owned())
}

#[test]
fn texts_of_plans_are_refused_or_stay_texts() {
    let harmless = harmless();
    let expected = structure(&rendered(&harmless, &runtime()));
    let mut accepted = 0;
    for text in hostile() {
        for field in PLAN_FIELDS {
            let plan = with(&harmless, field, &text);
            for written in written(&plan) {
                match read(&written) {
                    Err(error) => assert_refused_well(&error, &text),
                    Ok(read) => {
                        let said: String = check(&read).iter().map(ToString::to_string).collect();
                        assert_shown(&said, &text);
                        accepted += 1;
                    }
                }
            }
            // Second line of defence: templates escape texts that no reader has checked.
            let files = rendered(&plan, &runtime());
            assert_eq!(structure(&files), expected, "{field} {text:?}");
            for (path, file) in files {
                let hidden = file.chars().find(|&c| is_hidden(c) && c != '\n');
                assert_eq!(hidden, None, "{field} {text:?}: {path}");
            }
        }
    }
    assert!(accepted > 100, "only {accepted} texts were accepted: names may have quotes");
}

#[test]
fn refused_texts_are_refused_at_their_place() {
    let harmless = harmless();
    let path = scratch("place.yaml");
    let mut plan: Plan = serde_json::from_value(harmless).unwrap();
    plan.inputs.model.name = "a\u{1b}b".to_owned();
    std::fs::write(&path, plan.to_yaml().unwrap()).unwrap();
    let line = std::fs::read_to_string(&path).unwrap();
    let line = 1 + line
        .lines()
        .position(|line| line.contains("a\\eb") || line.contains("1b") || line.contains("1B"))
        .unwrap();
    let error = Plan::read(&Source::open(&path).unwrap()).unwrap_err();
    assert!(
        error.message.contains("`inputs.model.name` has the hidden character U+001B"),
        "{error}"
    );
    assert_eq!(error.place.as_ref().map(|place| place.line), Some(line), "{error}");
    assert!(error.help.unwrap().contains("1 to 100 printable characters"));
}

#[test]
fn runtimes_with_odd_paths_are_toml() {
    let harmless = harmless();
    let expected = structure(&rendered(&harmless, &runtime()));
    for text in hostile() {
        for (key, runtime) in
            [("path", RuntimeSource::Path(text.clone())), ("git", RuntimeSource::Git(text.clone()))]
        {
            let files = rendered(&harmless, &runtime);
            let manifest = manifest(&files["Cargo.toml"]);
            let dependencies = manifest["dependencies"].as_table_like().unwrap();
            assert_eq!(dependencies.len(), 1, "{text:?}");
            assert_eq!(manifest["dependencies"]["runtime"][key].as_str(), Some(text.as_str()));
            if key == "path" {
                assert_eq!(structure(&files), expected, "{text:?}");
            }
        }
    }
}

/// The commands that read a file; words may contain blanks.
fn on(words: &[&str], paths: &[&Path]) -> Run {
    let words = words.iter().map(|word| (*word).into());
    run_plan(words.chain(paths.iter().map(|path| path.as_os_str().to_owned())), &[])
}

fn assert_quiet(run: &Run, of: &str) {
    assert!([0, 2].contains(&run.code), "{of:?}: {run:?}");
    assert_shown(&run.err, of);
    assert_eq!(run.out.chars().find(|&c| is_hidden(c) && c != '\n'), None, "{of:?}: {run:?}");
}

#[test]
fn commands_on_hostile_plans_print_nothing_hidden() {
    let harmless = harmless();
    let folder = scratch("plans");
    std::fs::create_dir_all(&folder).unwrap();
    let (good, bad) = (folder.join("good.yaml"), folder.join("bad.yaml"));
    std::fs::write(&good, serde_json::to_string(&harmless).unwrap()).unwrap();
    for (index, text) in hostile().iter().enumerate() {
        let field = PLAN_FIELDS[index % PLAN_FIELDS.len()];
        std::fs::write(&bad, &written(&with(&harmless, field, text))[index % 2]).unwrap();
        assert_quiet(&on(&["check"], &[&bad]), text);
        assert_quiet(&on(&["check", "--json"], &[&bad]), text);
        assert_quiet(&on(&["diff"], &[&good, &bad]), text);
        if index % 5 == 0 {
            assert_quiet(&on(&["explain"], &[&bad]), text);
        }
        let trainer = folder.join(format!("trainer-{index}"));
        assert_quiet(&on(&["generate", "-o"], &[&trainer, &bad]), text);
    }
}

#[test]
fn the_exploit_is_refused() {
    let folder = scratch("exploit");
    std::fs::create_dir_all(&folder).unwrap();
    let (path, trainer) = (folder.join("exploit.yaml"), folder.join("trainer"));
    let exploit = with(&harmless(), "/tool", EXPLOIT);
    std::fs::write(&path, serde_json::to_string(&exploit).unwrap()).unwrap();
    for run in [on(&["check"], &[&path]), on(&["generate", "-o"], &[&trainer, &path])] {
        assert_eq!(run.code, 2, "{run:?}");
        assert!(run.err.contains("`tool` has the hidden character U+000A"), "{run:?}");
    }
    assert!(!trainer.exists());
}

const MODEL: &str = "{\"layers\": 4, \"hidden\": 64, \"heads\": 8, \"ffn\": 176, \"vocab\": 512, \"seq_len\": 64, \"global_batch\": 16";
const CONFIG: &str = "{\"hidden_size\": 64, \"num_attention_heads\": 8, \"num_hidden_layers\": 4, \"num_key_value_heads\": 8, \
    \"intermediate_size\": 128, \"vocab_size\": 100, \"max_position_embeddings\": 64";

#[test]
fn texts_of_models_are_refused_or_names() {
    for text in hostile() {
        let quoted = serde_json::to_string(&text).unwrap();
        for written in [
            format!("{MODEL}, \"name\": {quoted}}}"),
            format!("{MODEL}, \"activation\": {quoted}}}"),
            format!("{MODEL}, \"bias\": {quoted}}}"),
            format!("{MODEL}, {quoted}: 1}}"),
            format!("{CONFIG}, \"model_type\": \"llama\", \"_name_or_path\": {quoted}}}"),
            format!("{CONFIG}, \"model_type\": {quoted}}}"),
            format!("{CONFIG}, \"model_type\": \"llama\", \"hidden_act\": {quoted}}}"),
            format!("{CONFIG}, \"model_type\": \"gemma2\", \"layer_types\": [{quoted}]}}"),
        ] {
            let source = Source::from_bytes("model.json", written.into_bytes());
            match source.and_then(|source| models::model::read(&source)) {
                Err(error) => assert_refused_well(&error, &text),
                Ok(model) => assert_eq!(models::text::name_fault(&model.name), None, "{text:?}"),
            }
        }
    }
}

#[test]
fn texts_of_clusters_are_refused_or_names() {
    let good = models::cluster::shipped_source("dgx_h100").unwrap().unwrap();
    let edits = [
        ("name: dgx_h100", "name: "),
        ("  name: H100-SXM5-80GB", "  name: "),
        (
            "description: DGX H100, 8x H100-80GB SXM a node, NVLink 4, 8x 400 Gb/s InfiniBand",
            "description: ",
        ),
        ("name: nvlink", "name: "),
        ("base: megatron_2024", "base: "),
        ("efficiency: h100", "efficiency: "),
        ("any: 0", "any: "),
    ];
    for text in hostile() {
        let quoted = models::text::double_quoted(&text);
        for (from, to) in edits {
            let written = match good.text().contains(from) {
                true => good.text().replacen(from, &format!("{to}{quoted}"), 1),
                false => format!("{}\n{quoted}: 1\n", good.text()),
            };
            let source = Source::from_bytes("cluster.yaml", written.into_bytes());
            match source.and_then(|source| models::cluster::read(&source)) {
                Err(error) => assert_shown(&error.to_string(), &text),
                Ok(cluster) => {
                    let names = [&cluster.name, &cluster.device.name, &cluster.levels[0].name];
                    for name in names {
                        assert_eq!(models::text::name_fault(name), None, "{text:?}");
                    }
                    assert_eq!(models::text::line_fault(&cluster.description), None);
                }
            }
        }
    }
}

/// File names and words of the command line are untrusted as well.
#[test]
fn paths_and_words_print_nothing_hidden() {
    let folder = scratch("paths");
    std::fs::create_dir_all(&folder).unwrap();
    let harmless = serde_json::to_string(&harmless()).unwrap();
    for text in hostile() {
        let name = text.replace(['/', '\0'], "_");
        if name.is_empty() || name.len() > 200 {
            continue;
        }
        let path: PathBuf = folder.join(&name);
        assert_quiet(&on(&["check"], &[&path]), &text);
        std::fs::write(&path, &harmless).unwrap();
        assert_quiet(&on(&["check"], &[&path]), &text);
        std::fs::write(&path, format!("{MODEL}}}")).unwrap();
        assert_quiet(
            &on(&["estimate", "--cluster", "laptop", "--gpus", "1", "--json", "--model"], &[&path]),
            &text,
        );
        std::fs::remove_file(&path).unwrap();
        let word = Path::new(&name);
        assert_quiet(&on(&["--gpus"], &[word]), &text);
        assert_quiet(&on(&["--gpus", "1", "--model", "tiny", "--set"], &[word]), &text);
        assert_quiet(&on(&["--gpus", "1", "--model"], &[word]), &text);
    }
}

/// Trainers with hostile texts build, whether or not the reader would accept these. Takes minutes.
#[test]
#[ignore = "builds programs"]
fn hostile_names_build() {
    let harmless = harmless();
    let folder = scratch("builds");
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../../runtime");
    let runtime = RuntimeSource::Path(std::fs::canonicalize(own).unwrap().display().to_string());
    let passing = "\"#; {{ x }} */ ${IFS} `touch evil` \\ ' [a](b) <c>";
    for (name, text) in [
        ("passing", passing),
        ("exploit", EXPLOIT),
        ("bidi", "\u{202e}evil\u{202c} \u{2028}"),
        ("long", &"é".repeat(100)),
    ] {
        let plan = with(&with(&harmless, "/tool", text), "/inputs/model/name", text);
        let trainer = folder.join(name);
        for (path, file) in rendered(&plan, &runtime) {
            let path = trainer.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, file).unwrap();
        }
        let built = Command::new(env!("CARGO"))
            .args(["check", "--quiet", "--offline", "--manifest-path"])
            .arg(trainer.join("Cargo.toml"))
            .env("CARGO_TARGET_DIR", folder.join("target"))
            .output()
            .unwrap();
        assert!(built.status.success(), "{name}: {}", String::from_utf8_lossy(&built.stderr));
    }
}
