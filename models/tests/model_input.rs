//! Errors in model files, and that no file makes the reader panic.

use models::input::{InputError, Source, parse_yaml};
use models::model::{
    Activation, ModelSpec, NormKind, default_global_batch, read, shipped_names, shipped_source,
    warnings,
};
use proptest::prelude::*;

const MISSPELT: &str = "{\"model_type\": \"llama\", \"max_position_embeding\": 64}";
const GOOD: &str = "layers: 4\nhidden: 64\nheads: 8\nffn: 176\nvocab: 512\nseq_len: 64\n";

fn model(text: &str) -> Result<ModelSpec, InputError> {
    read(&Source::from_bytes("my-model.yaml", text.as_bytes().to_vec())?)
}

/// The good model with one key replaced or added.
fn with(line: &str) -> String {
    let key = line.split(':').next().unwrap();
    let kept = GOOD.lines().filter(|other| other.split(':').next() != Some(key));
    kept.chain([line]).map(|line| format!("{line}\n")).collect()
}

type Case = (String, usize, usize, &'static str, &'static str);

fn cases() -> Vec<Case> {
    let case = |text: &str, line, column, message, help| (with(text), line, column, message, help);
    let text =
        |text: &str, line, column, message, help| (text.to_owned(), line, column, message, help);
    vec![
        case(
            "hiden: 64",
            7,
            1,
            "unknown key `hiden`",
            "did you mean `hidden`? valid keys: name, layers,",
        ),
        case("colour: red", 7, 1, "unknown key `colour`", "valid keys: name, layers,"),
        case("heads: many", 6, 8, "`heads` cannot be `many`", "a whole number, not negative"),
        case("heads: [8]", 6, 8, "`heads` cannot be", "one value"),
        case("heads: 2.5", 6, 8, "`heads` cannot be `2.5`", "a whole number, not negative"),
        case(
            "heads: 99999999999999999999",
            6,
            8,
            "`heads` cannot be `99999999999999999999`",
            "a smaller whole number",
        ),
        case("heads: -8", 6, 8, "`heads` cannot be `-8`", "a whole number, not negative"),
        case("heads: 0", 6, 8, "`heads` cannot be 0", "valid: 1 to"),
        case("heads: 99999999999999999999999", 6, 8, "`heads` cannot be", "a smaller whole number"),
        case("hidden: 9000000000", 6, 9, "`hidden` cannot be 9000000000", "valid: 1 to 1000000"),
        case("layers: 1001", 6, 9, "`layers` cannot be 1001", "valid: 1 to 1000"),
        case(
            "heads: 7",
            6,
            8,
            "`heads` (7) does not divide `hidden` (64)",
            "valid: 1, 2, 4, 8, 16, 32, 64; or give head_dim",
        ),
        case(
            "kv_heads: 3",
            7,
            11,
            "`kv_heads` (3) does not divide `heads` (8)",
            "valid: 1, 2, 4, 8",
        ),
        case("head_dim: 7", 7, 11, "`head_dim` makes rotary heads 7 wide", "an even width"),
        case("rotary_dim: 3", 7, 13, "`rotary_dim` cannot be 3", "an even number up to 8"),
        case("rotary_dim: 10", 7, 13, "`rotary_dim` cannot be 10", "up to 8, the width of a head"),
        case("rotary_dim: 0", 7, 13, "`rotary_dim` cannot be 0", "positions: learned"),
        case(
            "positions: learned\nrotary_dim: 4",
            8,
            13,
            "`rotary_dim` cannot be 4",
            "valid with positions: rope",
        ),
        case(
            "rotary_dim: 4\nmla: { kv_rank: 8, rope_dim: 4, value_dim: 8 }",
            7,
            13,
            "`rotary_dim` cannot be 4",
            "mla's `rope_dim`",
        ),
        case("dropout: 1", 7, 10, "`dropout` cannot be 1", "valid: 0 up to"),
        case("dropout: .nan", 7, 10, "`dropout` cannot be `.nan`", "a finite number"),
        case("bias: perhaps", 7, 7, "`bias` cannot be `perhaps`", "true or false"),
        case(
            "activation: swigluu",
            7,
            13,
            "`activation` cannot be `swigluu`",
            "did you mean `swiglu`? valid values: relu,",
        ),
        case("norms_per_layer: 3", 7, 18, "`norms_per_layer` cannot be 3", "valid: 2, or 4"),
        case("attention_soft_cap: -1", 7, 21, "`attention_soft_cap` cannot be -1", "above 0"),
        case("norm_eps: 0", 7, 11, "`norm_eps` cannot be 0", "above 0, for example 1e-5"),
        case(
            "rope_theta: 0.5",
            7,
            13,
            "`rope_theta` cannot be 0.5",
            "1 or more, for example 10000",
        ),
        case(
            "query_pre_attn_scalar: 0",
            7,
            24,
            "`query_pre_attn_scalar` cannot be 0",
            "for example 8, the width of a head",
        ),
        case("embedding_scale: -1", 7, 18, "`embedding_scale` cannot be -1", "above 0"),
        case("gelu: exact", 7, 7, "`gelu` cannot be `exact`", "valid values: tanh, erf"),
        case("name: ''", 7, 7, "`name` is empty", "for example llama70b"),
        case(
            "positions: learned\nmax_positions: 32",
            6,
            10,
            "`seq_len` cannot be 64",
            "valid: 1 to 32",
        ),
        case("window: { tokens: 0 }", 7, 19, "`tokens` cannot be 0", "valid: 1 to"),
        case(
            "moe:\n  experts: 4\n  top_k: 5",
            9,
            10,
            "`top_k` (5) is more than the 4 experts",
            "valid: 1 to 4",
        ),
        case(
            "moe: { experts: 4, top_k: 2, z_loss: 0.1, router: sigmoid_bias }",
            7,
            38,
            "`z_loss` cannot be 0.1",
            "valid: 0 with `router: sigmoid_bias`",
        ),
        case(
            "moe: { experts: 4, top_k: 2, bias_update_rate: 0.001 }",
            7,
            48,
            "`bias_update_rate` cannot be 0.001",
            "valid: 0 with `router: softmax`",
        ),
        case(
            "moe: { experts: 4, top_k: 2, router: sigmoid_bias, bias_update_rate: -0.001 }",
            7,
            70,
            "`bias_update_rate` cannot be -0.001",
            "valid: 0 for never, or 0.000001 or more",
        ),
        case(
            "moe: { experts: 4, top_k: 2, router: sigmoid_bias, bias_update_rate: 1.0e-9 }",
            7,
            70,
            "`bias_update_rate` cannot be 0.000000001",
            "valid: 0 for never, or 0.000001 or more",
        ),
        case(
            "moe: { experts: 4, top_k: 2, router: sigmoid_bias, bias_update_rate: .inf }",
            7,
            70,
            "`bias_update_rate` cannot be `.inf`",
            "a finite number",
        ),
        case(
            "moe: { experts: 4, top_k: 2, first_dense: 5 }",
            7,
            43,
            "`first_dense` cannot be 5",
            "valid: 0 to 4",
        ),
        case("moe: { experts: 4 }", 7, 8, "missing required key `top_k`", "add `top_k: ...`"),
        case("moe: 4", 7, 6, "`moe` cannot be `4`", "a mapping"),
        text("layers: 4\nhidden: 64\n", 2, 1, "missing required key `heads`", "add `heads: ...`"),
        text(
            GOOD.trim_end_matches("seq_len: 64\n"),
            1,
            9,
            "missing `seq_len`",
            "add `seq_len: ...`",
        ),
        text("layers: 4\nlayers: 5\n", 2, 1, "key `layers` is given twice", "keep one"),
        text(
            "layers: 1000\nhidden: 1000000\nheads: 8\nffn: 10000000\nvocab: 9\nseq_len: 9\n\
             moe: { experts: 1000, top_k: 1 }\n",
            1,
            9,
            "more than 10^18",
            "fewer",
        ),
        text(
            "{\"model_type\": \"bert\"}",
            1,
            16,
            "`model_type` is not a supported",
            "supported: llama, mistral",
        ),
        text(
            "{\"model_type\": \"glm4\"}",
            1,
            16,
            "its RoPE turns neighbouring columns",
            "supported: llama, mistral",
        ),
        text(
            "{\n\t\"model_type\": \"llama\",\n\t\"num_hidden_layers\": \"x\"\n}",
            3,
            23,
            "`num_hidden_layers` cannot be",
            "a whole number",
        ),
        text("{\"model_type\": \"llama\"}", 1, 16, "missing required key `", "add \""),
        text(
            MISSPELT,
            1,
            16,
            "missing required key `max_position_embeddings`",
            "did you mean `max_position_embeding`?",
        ),
        text("layers: 4\nhidden: # later\n", 2, 7, "`hidden` has no value", "a whole number"),
        text("---\nlayers: 4\n---\nlayers: 5\n", 4, 1, "a second document", "one document"),
        text("just words", 1, 1, "the file cannot be", "a mapping"),
        text("layers: [1, 2\nhidden: 3", 2, 7, "cannot read this", "YAML"),
    ]
}

#[test]
fn a_wrong_file_is_told_where_and_what_is_valid() {
    for (text, line, column, message, help) in cases() {
        let error = model(&text).expect_err(&text);
        let place = error.place.clone().unwrap_or_else(|| panic!("no place: {error}"));
        assert_eq!((place.line, place.column), (line, column), "{error}");
        assert!(error.message.contains(message), "{error}");
        assert!(error.help.as_deref().unwrap_or("").contains(help), "{error}");
        let rest = place.text.chars().count().saturating_sub(place.column - 1).max(1);
        assert!((1..=rest).contains(&place.width), "{error}");
    }
}

#[test]
fn aliases_cannot_explode() {
    let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..12 {
        let aliases = vec![format!("*a{}", level - 1); 10].join(", ");
        text += &format!("a{level}: &a{level} [{aliases}]\n");
    }
    let error = model(&text).unwrap_err();
    assert!(error.place.is_some(), "{error}");
    assert!(error.help.as_deref().unwrap_or("").contains("aliases"), "{error}");
    let deep = "layers: ".to_owned() + &"[".repeat(100_000);
    assert!(model(&deep).unwrap_err().message.contains("cannot read this"));
}

#[test]
fn files_that_are_no_text() {
    let folder =
        std::env::temp_dir().join(format!("meshwright-model-input-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let error = Source::open(&folder).unwrap_err();
    assert!(error.message.contains("is a directory") && error.help.is_some(), "{error}");
    let error = Source::open(folder.join("missing.yaml")).unwrap_err();
    assert!(error.message.contains("missing.yaml") && error.help.is_some(), "{error}");
    for (bytes, says) in [
        (Vec::new(), "is empty"),
        (b" \n\n".to_vec(), "is empty"),
        (b"layers: 4\nname: \xff\n".to_vec(), "byte 16 (line 2)"),
        (vec![b' '; (16 << 20) + 1], "larger than 16 MiB"),
    ] {
        let path = folder.join("file.yaml");
        std::fs::write(&path, bytes).unwrap();
        let error = Source::open(&path).unwrap_err();
        assert!(error.message.contains(says) && error.help.is_some(), "{error}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_the_file_leaves_out_is_filled_in_and_said() {
    let spec = model(&with("max_positions: 4096").replace("seq_len: 64\n", "")).unwrap();
    assert_eq!((spec.seq_len, spec.global_batch, spec.name.as_str()), (4096, 1024, "my-model"));
    assert!(spec.assumptions[0].contains("`max_positions`"), "{:?}", spec.assumptions);
    assert!(spec.assumptions[1].contains("1024 sequences"), "{:?}", spec.assumptions);
    assert_eq!((spec.attention.kv_heads, spec.attention.head_dim), (8, 8));
    let batches = [1, 2048, 8192, 40, 3 << 20, 1 << 23, u64::MAX].map(default_global_batch);
    assert_eq!(batches, [1 << 22, 2048, 512, 131_072, 1, 1, 1]);
}

/// `llama70b.yaml` documents every key; those that it comments out must be right too.
#[test]
fn the_documented_keys_all_work() {
    let source = shipped_source("llama70b").unwrap().unwrap();
    let is_key =
        |line: &&str| line.split_whitespace().next().is_some_and(|word| word.ends_with(':'));
    let opened = |line| str::strip_prefix(line, "# ").filter(is_key).unwrap_or(line);
    let text: Vec<&str> = source.text().lines().map(opened).collect();
    // With latent attention there are no fewer key/value heads than query heads, and it has a
    // rotated part of its own.
    let text = text.join("\n").replace("kv_heads: 8 ", "kv_heads: 64 ");
    let text = text.replace("rotary_dim: 32 ", "# rotary_dim: 32 ");
    let spec = model(&text).unwrap_or_else(|error| panic!("{error}"));
    assert!(spec.attention.mla.is_some() && spec.attention.window.is_some() && spec.moe.is_some());
    assert_eq!((spec.attention.soft_cap, spec.final_soft_cap), (Some(50.0), Some(30.0)));
}

#[test]
fn the_command_line_overrides_the_file() {
    let text = format!("{{\"model_type\": \"llama\", {SHAPE}}}");
    let assumed = model(&text).unwrap();
    assert_eq!((assumed.seq_len, assumed.assumptions.len()), (9000, 3));
    let longer = assumed.clone().with_run(Some(65_536), None).unwrap();
    assert_eq!((longer.global_batch, longer.assumptions.len()), (64, 2));
    let said = assumed.clone().with_run(Some(65_536), Some(7)).unwrap();
    assert_eq!((said.seq_len, said.global_batch, said.assumptions.len()), (65_536, 7, 1));
    let file = model(&with("global_batch: 24")).unwrap();
    assert_eq!(file.clone().with_run(Some(32), None).unwrap().global_batch, 24);
    assert_eq!(file.clone().with_run(None, None).unwrap(), file);
    assert!(file.with_run(None, Some(0)).unwrap_err().help.unwrap().contains("1 to"));
    let learned = model(&with("positions: learned")).unwrap();
    assert!(learned.with_run(Some(65), None).unwrap_err().help.unwrap().contains("1 to 64"));
}

#[test]
fn byte_order_mark_and_windows_lines_are_no_matter() {
    let text = format!("\u{feff}{}", GOOD.replace('\n', "\r\n"));
    assert_eq!(model(&text), model(GOOD));
}

#[test]
fn an_error_prints_its_line_cut_around_the_caret() {
    let long = format!("{{\"x\": \"{}\", \"model_type\": \"bert\"}}", "y ".repeat(5_000));
    let text = model(&long).unwrap_err().to_string();
    assert!(text.len() < 1_000 && !text.contains('\u{1b}') && text.contains("^^^^"), "{text}");
    let escape = model("a: \u{1b}[31m").unwrap_err().to_string();
    assert!(!escape.contains('\u{1b}'), "{escape}");
    let short = model(&with("heads: many")).unwrap_err().to_string();
    assert!(
        short.contains("\n  --> my-model.yaml:6:8\n   |\n 6 | heads: many\n   |        ^^^^ "),
        "{short}"
    );
}

/// A small configuration with `keys` (JSON, comma-separated) added.
fn config(model_type: &str, keys: &str) -> Result<ModelSpec, InputError> {
    let comma = if keys.is_empty() { "" } else { ",\n" };
    let groups = if keys.contains("num_key_value_heads") { "" } else { KV_HEADS };
    model(&format!("{{\"model_type\": \"{model_type}\", {SHAPE}{groups}{comma}{keys}}}"))
}

const SHAPE: &str = "\"hidden_size\": 64, \"num_attention_heads\": 8, \"num_hidden_layers\": 4, \
                     \"intermediate_size\": 128, \"vocab_size\": 100, \
                     \"max_position_embeddings\": 9000";
const KV_HEADS: &str = ", \"num_key_value_heads\": 8";

/// Formulas of each class in transformers 4.57.
#[test]
fn hugging_face_classes_have_formulas_of_their_own() {
    let read = |model_type: &str, keys: &str| {
        config(model_type, keys).unwrap_or_else(|error| panic!("{model_type}: {error}"))
    };
    let gemma = read("gemma", "");
    assert_eq!((gemma.attention.head_dim, gemma.norm.per_layer), (256, 2));
    assert!(gemma.tied_embeddings && gemma.numerics.norm_unit_offset);
    assert_eq!((gemma.mlp.activation, gemma.numerics.embedding_scale), (Activation::Geglu, 8.0));

    let phi3 = read("phi3", "\"sliding_window\": 100, \"partial_rotary_factor\": 0.5");
    assert_eq!(phi3.attention.window.map(|window| window.tokens), Some(100));
    assert_eq!((phi3.attention.rotary_dim, phi3.numerics.norm_eps), (Some(4), 1e-5));
    assert!(phi3.assumptions.iter().any(|said| said.contains("Llama's names")));
    let long = "\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1.0]}";
    assert_eq!(read("phi3", long).numerics.unknown, ["rope_scaling"]);

    let factors = "\"attention_multiplier\": 0.25, \"embedding_multiplier\": 12, \
                   \"logits_scaling\": 16, \"residual_multiplier\": 0.22";
    let granite = read("granite", factors);
    assert_eq!(granite.numerics.score_scale(), 0.25);
    assert_eq!(granite.numerics.embedding_scale, 12.0);
    assert_eq!(granite.numerics.unknown, ["logits_scaling", "residual_multiplier"]);
    assert_eq!(read("granite", "").numerics.score_scale(), 1.0);

    let starcoder2 = read("starcoder2", "\"embedding_dropout\": 0.0");
    assert_eq!(starcoder2.norm.kind, NormKind::LayerNorm);
    assert_eq!(starcoder2.mlp.activation, Activation::Gelu);
    let attention = &starcoder2.attention;
    assert!(attention.qkv_bias && attention.out_bias && starcoder2.mlp.bias);
    assert!(starcoder2.tied_embeddings && starcoder2.dropout == 0.0);
    let plain = read("starcoder2", "\"use_bias\": false");
    assert!(!plain.attention.qkv_bias && !plain.attention.out_bias && !plain.mlp.bias);
    let apart = config("starcoder2", "\"residual_dropout\": 0.1").unwrap_err();
    assert!(apart.message.contains("`residual_dropout`, `embedding_dropout` and"), "{apart}");
}

/// What no model file says is named, and not "describe it in YAML".
#[test]
fn hugging_face_classes_that_cannot_be_said_say_why() {
    for (model_type, why) in [
        ("cohere", "turns neighbouring columns, and its attention and feed-forward blocks run"),
        ("falcon", "run side by side (`parallel_attn`)"),
        ("gemma3_text", "another base of RoPE"),
        ("glm4", "turns neighbouring columns"),
        ("gpt_neox", "run side by side (a parallel residual)"),
        ("mpt", "ALiBi"),
        ("olmo", "no weights"),
        ("olmo2", "after attention and feed-forward blocks alone"),
        ("smollm3", "no positions"),
    ] {
        let error = config(model_type, "").unwrap_err();
        assert!(error.message.contains(why), "{error}");
        let help = error.help.unwrap_or_default();
        assert!(help.starts_with("supported: llama") && !help.contains("YAML"), "{help}");
    }
}

#[test]
fn hugging_face_windows() {
    let window = |model_type: &str, keys: &str| {
        let window =
            config(model_type, keys).unwrap_or_else(|error| panic!("{error}")).attention.window;
        window.map(|window| (window.tokens, window.full_every))
    };
    let on = "\"use_sliding_window\": true, \"sliding_window\": 100, \"max_window_layers\": ";
    assert_eq!(window("mistral", ""), Some((4096, None)));
    assert_eq!(window("mistral", "\"sliding_window\": null"), None);
    assert_eq!(window("gemma2", ""), Some((4096, Some(2))));
    let full = format!("\"layer_types\": [{}]", ["\"full_attention\""; 4].join(", "));
    assert_eq!(window("gemma2", &full), None);
    assert_eq!(window("qwen2", "\"sliding_window\": 100"), None);
    assert_eq!(window("qwen2", &format!("{on} 0")), Some((100, None)));
    assert_eq!(window("qwen3", &format!("{on} 4")), None);
    let error = config("qwen2", &format!("{on} 2")).unwrap_err();
    assert!(error.message.contains("`max_window_layers` (2)") && error.place.unwrap().line == 2);
    let keys = "\"num_hidden_layers\": 32,\n\"use_sliding_window\": true";
    let text = SHAPE.replace("\"num_hidden_layers\": 4", keys);
    let error = model(&format!("{{\"model_type\": \"qwen3\", {text}{KV_HEADS}}}")).unwrap_err();
    assert!(error.message.contains("(28, the default where it is missing)"), "{error}");
    assert_eq!(error.place.map(|place| place.line), Some(2));
}

/// Missing keys take the defaults of the classes of transformers 4.57; null switches a part off.
#[test]
fn hugging_face_defaults_of_missing_keys() {
    let of_heads = |model_type: &str, heads: u64, keys: &str| {
        let given = format!("\"num_attention_heads\": {heads}");
        let shape = SHAPE.replace("\"num_attention_heads\": 8", &given);
        let spec =
            model(&format!("{{\"model_type\": \"{model_type}\", {shape}, \"head_dim\": 8{keys}}}"));
        spec.map(|spec| (spec.attention.kv_heads, spec.assumptions))
    };
    for (model_type, heads, default) in [
        ("llama", 64, 64),
        ("mistral", 64, 8),
        ("gemma2", 64, 4),
        ("qwen2", 64, 32),
        ("qwen3", 64, 32),
    ] {
        let (found, assumed) = of_heads(model_type, heads, "").unwrap();
        assert_eq!(found, default, "{model_type}");
        assert!(assumed[0].ends_with("the model file has no num_key_value_heads"), "{assumed:?}");
        let (found, assumed) =
            of_heads(model_type, heads, ", \"num_key_value_heads\": null").unwrap();
        assert_eq!(found, heads, "{model_type}");
        assert!(assumed.iter().all(|said| !said.contains("key_value")), "{assumed:?}");
    }
    let error = of_heads("qwen2", 8, "").unwrap_err();
    assert!(error.message.contains("`num_key_value_heads` is missing, and 32"), "{error}");
    assert!(error.place.is_some());

    let latent = |keys: &str| {
        let spec = config("deepseek_v3", &format!("{LATENT}{keys}")).unwrap();
        (spec.moe.unwrap().shared_ffn, spec.attention.mla.unwrap().q_rank, spec.assumptions)
    };
    let (shared_ffn, q_rank, assumed) = latent("");
    assert_eq!((shared_ffn, q_rank), (32, Some(1536)));
    let unmoved = |said: &String| said.starts_with("selection biases stay as they are");
    assert!(assumed.iter().any(unmoved), "{assumed:?}");
    let (shared_ffn, q_rank, _) = latent(", \"n_shared_experts\": null, \"q_lora_rank\": null");
    assert_eq!((shared_ffn, q_rank), (0, None));
    let (shared_ffn, q_rank, _) = latent(", \"n_shared_experts\": 2, \"q_lora_rank\": 24");
    assert_eq!((shared_ffn, q_rank), (64, Some(24)));
}

const LATENT: &str = "\"num_experts_per_tok\": 2, \"n_routed_experts\": 8, \
                      \"moe_intermediate_size\": 32, \"kv_lora_rank\": 16, \
                      \"qk_nope_head_dim\": 16, \"qk_rope_head_dim\": 8, \"v_head_dim\": 16";

#[test]
fn hugging_face_configurations_that_a_spec_cannot_say() {
    let experts = "\"num_experts\": 4, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 8, ";
    let local = "\"num_local_experts\": 4, \"num_experts_per_tok\": 2";
    let cases = [
        ("llama", "\"attention_dropout\": 0.1".to_owned(), "`attention_dropout` cannot be 0.1"),
        ("llama", "\"hidden_act\": \"tanh\"".to_owned(), "`hidden_act` cannot be"),
        (
            "llama",
            "\"num_key_value_heads\": 3".to_owned(),
            "`num_key_value_heads` (3) does not divide `num_attention_heads` (8)",
        ),
        ("qwen3_moe", format!("{experts}\"mlp_only_layers\": [1]"), "`mlp_only_layers`"),
        (
            "gemma2",
            "\"layer_types\": [\"full_attention\", \"x\"]".to_owned(),
            "`layer_types` cannot have `x`",
        ),
        (
            "qwen3",
            "\"layer_types\": [\"full_attention\", \"chunked_attention\"]".to_owned(),
            "`layer_types` cannot have `chunked_attention`",
        ),
        (
            "gpt_oss",
            format!("{local}, \"layer_types\": [\"sliding_attention\", \"full_attention\"]"),
            "`layer_types` has 2 layers, and the model 4",
        ),
        (
            "gpt_oss",
            format!("{local}, \"experts_per_token\": 4"),
            "`experts_per_token` (4) differs from `num_experts_per_tok` (2)",
        ),
        ("deepseek_v3", format!("{LATENT}, \"moe_layer_freq\": 2"), "`moe_layer_freq` cannot be 2"),
        (
            "llama",
            "\"partial_rotary_factor\": 0.4".to_owned(),
            "`partial_rotary_factor` cannot be 0.4",
        ),
        (
            "stablelm",
            "\"partial_rotary_factor\": 1.5".to_owned(),
            "`partial_rotary_factor` cannot be 1.5",
        ),
    ];
    for (model_type, keys, says) in cases {
        let error = config(model_type, &keys).expect_err(&keys);
        assert!(error.message.contains(says) && error.help.is_some(), "{error}");
        assert_eq!(error.place.as_ref().map(|place| place.line), Some(2), "{error}");
    }
}

/// Of heads of 8 columns, unless the class or the file has others; rounded down.
#[test]
fn hugging_face_parts_of_heads_that_are_rotated() {
    let rotated = |model_type: &str, keys: &str| {
        let spec = config(model_type, keys).unwrap_or_else(|error| panic!("{keys}: {error}"));
        assert_eq!(spec.numerics.unknown, [""; 0], "{keys}");
        spec.attention.rotary_dim
    };
    assert_eq!(rotated("llama", ""), None);
    assert_eq!(rotated("stablelm", ""), Some(2));
    assert_eq!(rotated("stablelm", "\"partial_rotary_factor\": 1.0"), None);
    let half = "\"partial_rotary_factor\": 0.5";
    assert_eq!(rotated("llama", half), Some(4));
    assert_eq!(rotated("qwen3", half), Some(64));
    assert_eq!(rotated("llama", &format!("{half}, \"head_dim\": 5")), Some(2));
}

/// Keys that change the mathematics are named; no key is ignored silently.
#[test]
fn hugging_face_keys_are_read_or_named() {
    let shape = "\"hidden_size\": 64, \"num_attention_heads\": 8, \"num_hidden_layers\": 4, \
                 \"intermediate_size\": 128, \"vocab_size\": 100, \"max_position_embeddings\": 9000";
    let told = |keys: &str| {
        let text = format!("{{\"model_type\": \"llama\", {shape},\n{keys}}}");
        let source = Source::from_bytes("config.json", text.into_bytes()).unwrap();
        let spec = read(&source).unwrap_or_else(|error| panic!("{error}"));
        (warnings(&source, &spec), spec.numerics.unknown)
    };
    for (keys, unknown) in [
        ("\"quantization_config\": {\"bits\": 4}", "quantization_config"),
        ("\"rope_scaling\": {\"factor\": 8.0}", "rope_scaling"),
        ("\"add_cross_attention\": true", "add_cross_attention"),
        ("\"rope_interleave\": true", "rope_interleave: true"),
        ("\"qk_layernorm\": true", "qk_layernorm"),
        ("\"use_parallel_residual\": true", "use_parallel_residual"),
        ("\"hidden_dropout\": 0.1", "hidden_dropout"),
        ("\"router_jitter_noise\": 0.1", "router_jitter_noise"),
    ] {
        let (said, found) = told(keys);
        assert_eq!(found, [unknown]);
        assert!(
            said.len() == 1 && said[0].contains(unknown) && said[0].contains("generate"),
            "{said:?}"
        );
    }
    let harmless = "\"partial_rotary_factor\": 1.0, \"quantization_config\": null, \"rope_scaling\": null, \
                    \"rope_interleave\": false, \"torch_dtype\": \"bfloat16\", \"transformers_version\": \"4.57.0\", \
                    \"architectures\": [\"LlamaForCausalLM\"], \"use_cache\": true, \"bos_token_id\": 1";
    assert_eq!(told(harmless), (vec![], vec![]));
    let (said, unknown) = told("\"clip_qkv\": 8,\n\"rope_thetaa\": 5e5");
    assert_eq!(unknown, [""; 0]);
    assert!(said[0].contains("`clip_qkv` (line 2), `rope_thetaa` (line 3)"), "{said:?}");
    let (said, _) = told("\"num_local_experts\": 8, \"num_experts_per_tok\": 2");
    for key in ["`num_local_experts`", "`num_experts_per_tok`"] {
        assert!(said[0].contains(key), "a dense model is told of experts: {said:?}");
    }
    for (keys, named) in [
        ("\"kv_lora_rank\": 16, \"v_head_dim\": 8", &["`kv_lora_rank`", "`v_head_dim`"][..]),
        ("\"sliding_window\": 16", &["`sliding_window`"]),
        ("\"layer_types\": [\"sliding_attention\"]", &["`layer_types`"]),
    ] {
        let (said, _) = told(keys);
        for key in named {
            assert!(said.len() == 1 && said[0].contains(key), "no {key}: {said:?}");
        }
    }
    for switched_off in [
        "\"sliding_window\": null",
        "\"sliding_window\": 16, \"use_sliding_window\": false",
        "\"layer_types\": [\"full_attention\"]",
    ] {
        assert_eq!(told(switched_off).0, [""; 0], "{switched_off}");
    }
    let (said, _) =
        told(&(0..30).map(|n| format!("\"key_{n}\": 1")).collect::<Vec<_>>().join(", "));
    assert!(said[0].contains("`key_9`") && said[0].ends_with("and 20 more"), "{said:?}");
}

/// What a type's class does not read is named, also where another type's class reads it.
#[test]
fn hugging_face_keys_of_other_types_are_named() {
    for (model_type, keys, named) in [
        ("llama", "\"use_qkv_bias\": true", "`use_qkv_bias`"),
        ("llama", "\"layer_norm_eps\": 1e-6", "`layer_norm_eps`"),
        ("llama", "\"n_layer\": 2", "`n_layer`"),
        ("mistral", "\"attention_bias\": true", "`attention_bias`"),
        ("qwen2", "\"sliding_window\": 16", "`sliding_window`"),
        ("gemma2", "\"hidden_act\": \"silu\"", "`hidden_act`"),
        ("stablelm", "\"rms_norm_eps\": 1e-6", "`rms_norm_eps`"),
        ("stablelm", "\"head_dim\": 16", "`head_dim`"),
        ("qwen2", "\"attention_bias\": false", "`attention_bias`"),
        ("qwen2", "\"use_qkv_bias\": false", "`use_qkv_bias`"),
        ("mistral", "\"use_sliding_window\": false", "`use_sliding_window`"),
        ("mistral", "\"layer_types\": [\"full_attention\"]", "`layer_types`"),
        ("llama", "\"rope_interleaved\": true", "`rope_interleaved`"),
        ("gpt2", "\"attention_dropout\": 0.0", "`attention_dropout`"),
        ("gpt2", "\"hidden_dropout\": 0", "`hidden_dropout`"),
        ("gpt2", "\"mlp_bias\": false", "`mlp_bias`"),
        ("deepseek_v3", &format!("{LATENT}, \"aux_loss_alpha\": 0.001"), "`aux_loss_alpha`"),
        ("deepseek_v3", &format!("{LATENT}, \"scoring_func\": \"softmax\""), "`scoring_func`"),
        ("deepseek_v3", &format!("{LATENT}, \"topk_method\": \"greedy\""), "`topk_method`"),
    ] {
        let said = told(model_type, keys);
        assert!(said.len() == 1 && said[0].contains(named), "{model_type}, {keys}: {said:?}");
    }
}

/// Keys of released files and of those that transformers 4.57 writes, over the common shape.
#[test]
fn keys_of_released_files_are_not_named() {
    let named = "\"architectures\": [\"X\"], \"bos_token_id\": 2, \"eos_token_id\": [1, 2], \
                 \"initializer_range\": 0.02, \"torch_dtype\": \"bfloat16\", \
                 \"transformers_version\": \"4.57.0\", \"use_cache\": true";
    let rotary = "\"tie_word_embeddings\": false, \"attention_dropout\": 0.0, \"rope_theta\": 1e4";
    let switched_off = "\"max_window_layers\": 28, \"sliding_window\": 32768, \
                        \"use_sliding_window\": false, \"rms_norm_eps\": 1e-6";
    let gemma2 = "\"attn_logit_softcapping\": 50.0, \"cache_implementation\": \"hybrid\", \
                  \"final_logit_softcapping\": 30.0, \"hidden_activation\": \"gelu_pytorch_tanh\", \
                  \"hidden_act\": \"gelu_pytorch_tanh\", \"query_pre_attn_scalar\": 256, \
                  \"sliding_window\": 4096";
    let llama_tokens = "\"pad_token_id\": 0, \"pretraining_tp\": 1, \"rope_scaling\": null, \
                        \"attention_bias\": false, \"mlp_bias\": false, \
                        \"max_sequence_length\": 2048, \"is_llama_config\": true, \
                        \"rope_interleaved\": false, \"transformers.js_config\": {\"a\": 1}";
    let gpt2 = "\"activation_function\": \"gelu_new\", \"attn_pdrop\": 0.1, \"embd_pdrop\": 0.1, \
                \"layer_norm_epsilon\": 1e-5, \"n_ctx\": 1024, \"n_special\": 0, \
                \"predict_special_tokens\": true, \"output_past\": true, \"_num_labels\": 1, \
                \"resid_pdrop\": 0.1, \"summary_activation\": null, \"summary_type\": \"cls_index\", \
                \"summary_first_dropout\": 0.1, \"summary_proj_to_labels\": true, \
                \"summary_use_proj\": true, \"n_inner\": null, \"task_specific_params\": {\"a\": 1}, \
                \"reorder_and_upcast_attn\": false, \"scale_attn_weights\": true, \
                \"scale_attn_by_inverse_layer_idx\": false";
    let mixtral = "\"hidden_act\": \"silu\", \"num_experts_per_tok\": 2, \"num_local_experts\": 8, \
                   \"output_router_logits\": false, \"rms_norm_eps\": 1e-5, \
                   \"router_aux_loss_coef\": 0.02, \"router_jitter_noise\": 0.0, \
                   \"sliding_window\": null, \"head_dim\": null";
    let qwen3_moe = "\"attention_bias\": false, \"decoder_sparse_step\": 1, \"head_dim\": 128, \
                     \"hidden_act\": \"silu\", \"max_window_layers\": 48, \"mlp_only_layers\": [], \
                     \"moe_intermediate_size\": 32, \"norm_topk_prob\": true, \"num_experts\": 8, \
                     \"num_experts_per_tok\": 2, \"output_router_logits\": false, \
                     \"rms_norm_eps\": 1e-6, \"rope_scaling\": {\"rope_type\": \"default\"}, \
                     \"router_aux_loss_coef\": 0.001, \"sliding_window\": null, \
                     \"use_sliding_window\": false, \"use_qk_norm\": true, \"qkv_bias\": false, \
                     \"shared_expert_intermediate_size\": 0";
    let deepseek_v3 = format!(
        "{LATENT}, \"attention_bias\": false, \"auto_map\": {{\"a\": \"b\"}}, \"ep_size\": 1, \
         \"first_k_dense_replace\": 3, \"hidden_act\": \"silu\", \"moe_layer_freq\": 1, \
         \"n_group\": 8, \"n_shared_experts\": 1, \"norm_topk_prob\": true, \
         \"num_nextn_predict_layers\": 1, \"pretraining_tp\": 1, \"q_lora_rank\": 24, \
         \"rms_norm_eps\": 1e-6, \"routed_scaling_factor\": 2.5, \
         \"scoring_func\": \"sigmoid\", \"seq_aux\": true, \"topk_group\": 4, \
         \"topk_method\": \"noaux_tc\", \"rope_scaling\": null"
    );
    let gpt_oss = "\"attention_bias\": true, \"experts_per_token\": 4, \"num_experts_per_tok\": 4, \
                   \"head_dim\": 64, \"hidden_act\": \"silu\", \"initial_context_length\": 4096, \
                   \"num_local_experts\": 32, \"output_router_logits\": false, \
                   \"pad_token_id\": 199999, \"rms_norm_eps\": 1e-5, \
                   \"rope_scaling\": {\"beta_fast\": 32.0, \"beta_slow\": 1.0, \"factor\": 32.0, \
                   \"original_max_position_embeddings\": 4096, \"rope_type\": \"yarn\", \
                   \"truncate\": false}, \"router_aux_loss_coef\": 0.9, \"sliding_window\": 128, \
                   \"swiglu_limit\": 7.0";
    let stablelm = "\"hidden_act\": \"silu\", \"hidden_dropout\": 0.0, \"layer_norm_eps\": 1e-5, \
                    \"partial_rotary_factor\": 0.25, \"qk_layernorm\": false, \
                    \"rope_scaling\": null, \"use_parallel_residual\": false, \
                    \"use_qkv_bias\": true";
    let kinds = |kind: &str| format!("\"layer_types\": [{}]", [kind; 2].join(", "));
    let alternating = kinds("\"sliding_attention\", \"full_attention\"");
    let full = kinds("\"full_attention\", \"full_attention\"");
    for (model_type, keys) in [
        ("llama", llama_tokens.to_owned()),
        (
            "mistral",
            "\"sliding_window\": null, \"head_dim\": 8, \"attention_bias\": false".to_owned(),
        ),
        ("qwen2", format!("{switched_off}, \"use_mrope\": false")),
        ("qwen2", format!("{switched_off}, {full}")),
        ("qwen3", format!("{switched_off}, \"attention_bias\": false, \"head_dim\": 128")),
        ("gemma2", format!("{gemma2}, \"sliding_window_size\": 4096")),
        ("gemma2", format!("{gemma2}, \"use_bidirectional_attention\": null, {alternating}")),
        ("gemma2", format!("{gemma2}, {full}")),
        ("gpt2", gpt2.to_owned()),
        ("mixtral", mixtral.to_owned()),
        ("qwen3_moe", qwen3_moe.to_owned()),
        ("deepseek_v3", deepseek_v3),
        ("gpt_oss", format!("{gpt_oss}, {alternating}")),
        ("stablelm", stablelm.to_owned()),
    ] {
        let every = if model_type == "gpt2" { "\"prefix\": null" } else { rotary };
        let said = told(model_type, &format!("{named}, {every}, {keys}"));
        assert_eq!(said, [""; 0], "{model_type}: {keys}");
    }
}

/// The warnings of a small configuration with `keys` added.
fn told(model_type: &str, keys: &str) -> Vec<String> {
    let rotary = format!("{SHAPE}{KV_HEADS}");
    let shape = match model_type {
        "gpt2" => {
            "\"n_embd\": 64, \"n_head\": 8, \"n_layer\": 4, \"n_positions\": 40, \"vocab_size\": 100"
        }
        _ => &rotary,
    };
    let text = format!("{{\"model_type\": \"{model_type}\", {shape},\n{keys}}}");
    let source = Source::from_bytes("config.json", text.into_bytes()).unwrap();
    let spec = read(&source).unwrap_or_else(|error| panic!("{error}"));
    warnings(&source, &spec)
}

#[test]
fn shipped_configurations_have_no_unknown_keys() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/hugging_face");
    for entry in std::fs::read_dir(folder).unwrap() {
        let source = Source::open(entry.unwrap().path()).unwrap();
        let said = warnings(&source, &read(&source).unwrap());
        assert!(said.iter().all(|line| !line.contains("no effect")), "{said:?}");
    }
}

#[test]
fn json_is_read_as_json() {
    let emoji =
        "\"note\": \"caf\\u00e9 \\ud83d\\ude00 a\\/b\", \"_name_or_path\": \"a\\/my-llama\"";
    assert_eq!(config("llama", emoji).unwrap().name, "my-llama");
    let long = format!("\"note\": [{}0]", "0, ".repeat(50_000));
    assert_eq!(config("llama", &long.replace('\n', "")).unwrap().layers, 4);
}

#[test]
fn nearest_of_nothing() {
    let source = Source::from_bytes("x", b"a: 1".to_vec()).unwrap();
    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Nothing {}
    assert!(parse_yaml::<Nothing>(&source).unwrap_err().message.contains("unknown key `a`"));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Source::from_bytes("random", bytes).and_then(|source| read(&source)).map_err(|e| e.to_string());
    }

    #[test]
    fn random_yaml_like_text_never_panics(text in "([a-z_]{1,9}|[0-9:{}\\[\\],\"'&*!|>%@#\\-\n\t ]|layers|hidden|\u{e9}){0,60}") {
        let _ = model(&text).map_err(|e| e.to_string());
    }

    #[test]
    fn mutated_models_never_panic(
        which in 0..shipped_names().count(),
        edits in proptest::collection::vec((any::<prop::sample::Index>(), "[ -~\n\u{e9}]{0,12}", 0_usize..12), 1..6),
    ) {
        let name = shipped_names().nth(which).unwrap();
        let mut text: Vec<char> = shipped_source(name).unwrap().unwrap().text().chars().collect();
        for (at, insert, remove) in edits {
            let at = at.index(text.len());
            text.splice(at..(at + remove).min(text.len()), insert.chars());
            text.push('\n');
        }
        if let Ok(spec) = model(&text.into_iter().collect::<String>()) {
            let _ = (models::model::params::total(&spec), models::model::params::active(&spec));
            let _ = (spec.tokens_per_step(), spec.with_run(Some(9), None));
        }
    }
}
