//! Parameter counts against published ones, and against the tensors of small checkpoints.

use models::input::Source;
use models::model::{
    Gelu, LayerKind, ModelSpec, NormKind, Numerics, Router, params, read, shipped, shipped_names,
};

const DENSE: LayerKind = LayerKind { moe: false, windowed: false };
const MIXTURE: LayerKind = LayerKind { moe: true, windowed: false };

fn model(name: &str) -> ModelSpec {
    shipped(name).expect(name).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn hugging_face(case: &str) -> ModelSpec {
    let path = format!("{}/tests/data/hugging_face/{case}.json", env!("CARGO_MANIFEST_DIR"));
    read(&Source::open(&path).unwrap()).unwrap_or_else(|error| panic!("{error}"))
}

/// Exact totals of the released checkpoints.
#[test]
fn totals_of_released_models() {
    let expected = [
        ("llama2_7b", 6_738_415_616),
        ("llama8b", 8_030_261_248),
        ("llama70b", 70_553_706_496),
        ("llama405b", 405_853_388_800),
        ("gemma2_9b", 9_241_705_984),
        ("mixtral_8x7b", 46_702_792_704),
        ("mixtral_8x22b", 140_620_634_112),
        ("deepseek_v3", 671_026_419_200),
        ("qwen3_235b_a22b", 235_093_634_560),
        ("gpt2_124m", 124_439_808),
        ("llama2_70b", 68_976_648_192),
    ];
    for (name, total) in expected {
        assert_eq!(params::total(&model(name)), total, "{name}");
    }
}

/// The same of configurations that no shipped file has.
#[test]
fn totals_of_released_configurations() {
    let gemma = "\"hidden_size\": 3072, \"num_attention_heads\": 16, \"num_hidden_layers\": 28, \
                 \"intermediate_size\": 24576, \"vocab_size\": 256000, \"head_dim\": 256, \
                 \"num_key_value_heads\": 16, \"max_position_embeddings\": 8192";
    let phi3 = "\"hidden_size\": 3072, \"num_attention_heads\": 32, \"num_hidden_layers\": 32, \
                \"intermediate_size\": 8192, \"vocab_size\": 32064, \"num_key_value_heads\": 32, \
                \"max_position_embeddings\": 4096, \"sliding_window\": 2047, \
                \"original_max_position_embeddings\": 4096, \"attention_bias\": false";
    let granite = "\"hidden_size\": 4096, \"num_attention_heads\": 32, \"num_hidden_layers\": 40, \
                   \"intermediate_size\": 12800, \"vocab_size\": 49155, \
                   \"num_key_value_heads\": 8, \"max_position_embeddings\": 4096, \
                   \"tie_word_embeddings\": true, \"embedding_multiplier\": 12.0, \
                   \"attention_multiplier\": 0.0078125";
    let starcoder2 = "\"hidden_size\": 3072, \"num_attention_heads\": 24, \
                      \"num_hidden_layers\": 30, \"intermediate_size\": 12288, \
                      \"vocab_size\": 49152, \"num_key_value_heads\": 2, \
                      \"max_position_embeddings\": 16384, \"sliding_window\": 4096, \
                      \"residual_dropout\": 0.1, \"embedding_dropout\": 0.1, \
                      \"attention_dropout\": 0.1";
    let totals = [
        ("gemma", gemma, 8_537_680_896),
        ("phi3", phi3, 3_821_079_552),
        ("granite", granite, 8_170_848_256),
        ("starcoder2", starcoder2, 3_030_371_328),
    ];
    for (model_type, keys, total) in totals {
        let text = format!("{{\"model_type\": \"{model_type}\", {keys}}}");
        let source = Source::from_bytes("config.json", text.into_bytes()).unwrap();
        let spec = read(&source).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(params::total(&spec), total, "{model_type}");
        assert_eq!(models::model::warnings(&source, &spec), [""; 0], "{model_type}");
    }
}

/// Half of a head's columns: NeMo's `NemotronConfig.rotary_percent`.
#[test]
fn nemotron_rotates_half_of_each_head() {
    let attention = model("nemotron4_15b").attention;
    assert_eq!((attention.head_dim, attention.rotary_dim), (128, Some(64)));
}

/// Billions as model cards and papers print them (arXiv 2505.09388, 2405.04434, 2508.10925,
/// 2402.16819; Meta's card of Llama 4; xAI's release of Grok-1; MosaicML's card of MPT-7B). Our
/// counts leave small biases out.
#[test]
fn printed_totals_of_models_whose_exact_count_is_not_at_hand() {
    let printed = [
        ("qwen3_30b_a3b", 30.5),
        ("deepseek_v2", 236.0),
        ("gpt_oss_120b", 116.8),
        ("grok1", 314.0),
        ("llama4_maverick", 400.0),
        ("nemotron4_15b", 15.6),
        ("mpt_7b", 6.65),
    ];
    for (name, billions) in printed {
        let found = params::total(&model(name)) as f64 / 1e9;
        assert!((found / billions - 1.0).abs() < 0.007, "{name}: {found} B, printed {billions} B");
    }
}

#[test]
fn active_parameters_of_mixtures() {
    assert_eq!(params::active(&model("mixtral_8x7b")), 12_879_925_248);
    assert_eq!(params::active(&model("deepseek_v3")), 37_552_297_472);
    let dense = model("llama8b");
    assert_eq!(params::active(&dense), params::total(&dense));
}

/// Attention and feed-forward parameters of one layer.
#[test]
fn parts_of_a_layer() {
    let expected = [
        ("llama2_7b", 67_108_864, 135_266_304),
        ("llama8b", 41_943_040, 176_160_768),
        ("llama70b", 150_994_944, 704_643_072),
        ("llama405b", 570_425_344, 2_617_245_696),
        ("gemma2_9b", 44_040_192, 154_140_672),
    ];
    for (name, attention, mlp) in expected {
        let layer = params::layer(&model(name), DENSE);
        assert_eq!((layer.attention_matrices, layer.mlp_matrices), (attention, mlp), "{name}");
    }
    assert_eq!(params::attention_total(&model("deepseek_v3")), 187_107_328);
}

/// SC'21 (arXiv 2104.04473) equation 2, and the sizes that its Table 1 prints, in billions.
#[test]
fn gpt_of_sc21_table_1() {
    let printed = [
        ("gpt_1.7b", "1.7", 1.6522),
        ("gpt_3.6b", "3.6", 3.5622),
        ("gpt_7.5b", "7.5", 7.4678),
        ("gpt_18b", "18.4", 18.4497),
        ("gpt_39b", "39.1", 39.0960),
        ("gpt_76b", "76.1", 76.0507),
        ("gpt_145b", "145.6", 145.6222),
        ("gpt_310b", "310.1", 310.1305),
        ("gpt_530b", "529.6", 529.6008),
        ("gpt_1t", "1008.0", 1008.0387),
    ];
    for (name, digits, billions) in printed {
        let spec = model(name);
        // Equation 2 leaves out the final norm.
        let count = params::total(&spec) - params::norm(&spec);
        let (l, h, v, s) = (spec.layers as u64, spec.hidden, spec.vocab, spec.seq_len);
        assert_eq!(count, 12 * l * h * h + 13 * l * h + (v + s) * h, "{name}");
        assert!((count as f64 / 1e9 - billions).abs() < 5.1e-5, "{name}: {count}");
        assert_eq!(format!("{:.1}", count as f64 / 1e9), digits, "{name}");
    }
}

/// The number of elements in the sibling `model.safetensors` of each configuration.
#[test]
fn counts_equal_the_tensors_of_small_checkpoints() {
    let expected = [
        ("deepseek_v3", 230_136),
        ("gemma2", 164_928),
        ("gpt2", 235_392),
        ("llama_gqa", 250_816),
        ("llama_tied", 193_088),
        ("mixtral", 428_608),
        ("mixtral_aux", 428_608),
        ("qwen2", 230_720),
        ("qwen3_moe", 280_832),
        ("stablelm", 29_440),
    ];
    for (case, elements) in expected {
        assert_eq!(params::total(&hugging_face(case)), elements, "{case}");
    }
}

#[test]
fn hugging_face_shapes() {
    let deepseek = hugging_face("deepseek_v3");
    let moe = deepseek.moe.as_ref().unwrap();
    assert_eq!((moe.first_dense, moe.shared_ffn, moe.router), (1, 24, Router::SigmoidBias));
    assert!(!deepseek.layer_kind(0).moe && deepseek.layer_kind(1).moe);
    let gemma = hugging_face("gemma2");
    let windowed: Vec<bool> = (0..4).map(|layer| gemma.layer_kind(layer).windowed).collect();
    assert_eq!(windowed, [true, false, true, false]);
    assert_eq!((gemma.attention.soft_cap, gemma.final_soft_cap), (Some(4.0), Some(5.0)));
    assert_eq!(hugging_face("mixtral_aux").moe.unwrap().aux_loss, 0.02);
    assert_eq!(hugging_face("mixtral").moe.unwrap().aux_loss, 0.0);
    assert_eq!(hugging_face("qwen2").attention.window, None);
    assert_eq!((gemma.seq_len, gemma.global_batch, gemma.assumptions.len()), (40, 131_072, 2));
    let gpt2 = hugging_face("gpt2");
    assert_eq!((gpt2.mlp.ffn, gpt2.dropout, gpt2.tied_embeddings), (256, 0.0, true));
}

/// The parts a mesh divides add up to the whole, and no part is lost between them.
#[test]
fn parts_add_up_for_every_shipped_model() {
    for name in shipped_names() {
        let spec = model(name);
        assert_eq!(spec.name, name);
        assert!(spec.assumptions.is_empty(), "{name}: {:?}", spec.assumptions);
        let layers: u64 =
            (0..spec.layers).map(|i| params::layer(&spec, spec.layer_kind(i)).total()).sum();
        let ends = params::embedding(&spec) + params::positions(&spec) + params::head(&spec);
        assert_eq!(layers + ends + params::norm(&spec), params::total(&spec), "{name}");
    }
}

#[test]
fn every_shipped_file_is_listed() {
    let folder = format!("{}/shipped/models", env!("CARGO_MANIFEST_DIR"));
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().file_name());
    let mut files: Vec<String> = files.map(|file| file.into_string().unwrap()).collect();
    let mut listed: Vec<String> = shipped_names().map(|name| format!("{name}.yaml")).collect();
    files.sort();
    listed.sort();
    assert_eq!(files, listed);
    assert!(shipped("llama70b.yaml").is_some() && shipped("llama71b").is_none());
}

/// Sizes that the names and papers promise.
#[test]
fn shipped_sizes_match_their_names() {
    let billions = [
        ("gpt3_175b", 174.6, 0.1),
        ("opt_175b", 174.6, 0.3),
        ("vocab_4b", 4.0, 0.5),
        ("vocab_10b", 10.0, 0.5),
        ("vocab_21b", 21.0, 1.0),
        ("vocab_7b", 7.0, 0.5),
        ("vocab_16b", 16.0, 1.0),
        ("vocab_30b", 30.0, 1.0),
    ];
    for (name, size, tolerance) in billions {
        let count = params::total(&model(name)) as f64 / 1e9;
        assert!((count - size).abs() <= tolerance, "{name}: {count}");
    }
    let ampipe = model("ampipe_base");
    let mixture = params::layer(&ampipe, MIXTURE);
    assert_eq!(mixture.expert_matrices, 8 * (2 * 768 * 3072 + 3072 + 768));
    assert_eq!((mixture.router, mixture.mlp_matrices), (8 * 768, 0));
}

/// Constants of the models' formulas, as the configurations of small checkpoints have them, or by
/// default of their classes.
#[test]
fn hugging_face_numerics() {
    let llama = hugging_face("llama_gqa").numerics;
    assert_eq!((llama.norm_eps, llama.rope_theta), (1e-5, 500_000.0));
    assert_eq!((llama.query_pre_attn_scalar, llama.embedding_scale), (8.0, 1.0));
    assert!(!llama.norm_unit_offset && llama.unknown.is_empty());
    let gemma = hugging_face("gemma2").numerics;
    assert_eq!((gemma.norm_eps, gemma.rope_theta), (1e-6, 10_000.0));
    assert_eq!((gemma.query_pre_attn_scalar, gemma.embedding_scale), (20.0, 8.0));
    assert!(gemma.norm_unit_offset);
    assert_eq!(gemma.gelu, Gelu::Tanh);
    assert_eq!(hugging_face("qwen2").numerics.rope_theta, 1e6);
    assert_eq!(hugging_face("gpt2").numerics.norm_eps, 1e-5);
    // Where the key is missing, the class decides.
    assert_eq!(configured("llama", "").norm_eps, 1e-6);
    assert_eq!(configured("llama", "\"hidden_act\": \"gelu\",").gelu, Gelu::Erf);
    assert_eq!(configured("llama", "\"hidden_act\": \"gelu_new\",").gelu, Gelu::Tanh);
    let scaled = configured("llama", "\"rope_scaling\": {\"factor\": 8.0},");
    assert_eq!(scaled.unknown, ["rope_scaling"]);
    assert!(configured("llama", "\"rope_scaling\": null,").unknown.is_empty());
    for key in ["rope_type", "type"] {
        let plain = format!("\"rope_scaling\": {{\"{key}\": \"default\"}},");
        assert!(configured("llama", &plain).unknown.is_empty());
        let experts = "\"num_local_experts\": 4, \"num_experts_per_tok\": 2,";
        assert!(configured("gpt_oss", experts).yarn.is_some());
        assert_eq!(configured("gpt_oss", &format!("{plain} {experts}")).yarn, None);
    }
}

fn configured(model_type: &str, more: &str) -> Numerics {
    let text = format!(
        "{{\"model_type\": \"{model_type}\", {more} \"num_hidden_layers\": 2, \"hidden_size\": 64, \
         \"num_attention_heads\": 8, \"num_key_value_heads\": 8, \"intermediate_size\": 128, \
         \"vocab_size\": 100, \"max_position_embeddings\": 32}}"
    );
    read(&Source::from_bytes("config.json", text.into_bytes()).unwrap()).unwrap().numerics
}

#[test]
fn stablelm_has_norms_with_biases_alone() {
    let spec = hugging_face("stablelm");
    assert_eq!((spec.norm.kind, spec.numerics.norm_eps), (NormKind::LayerNorm, 1e-5));
    let attention = &spec.attention;
    assert!(!attention.qkv_bias && !attention.out_bias && !spec.mlp.bias);
    assert_eq!((attention.head_dim, attention.rotary_dim), (8, Some(6)));
    let text = "\"use_qkv_bias\": true, \"layer_norm_eps\": 1e-6,";
    assert_eq!(configured("stablelm", text).norm_eps, 1e-6);
}

/// Non-default constants of the shipped files.
#[test]
fn shipped_numerics() {
    let theta = |name| model(name).numerics.rope_theta;
    assert_eq!([theta("llama70b"), theta("llama2_70b"), theta("mixtral_8x7b")], [5e5, 1e4, 1e6]);
    let gemma = model("gemma2_9b");
    assert!((gemma.numerics.embedding_scale - (gemma.hidden as f64).sqrt()).abs() < 1e-12);
    assert_eq!(gemma.numerics.query_pre_attn_scalar, 256.0);
}

/// YaRN as configurations have it, some with the older name of its kind too.
#[test]
fn stretched_positions() {
    let scaling = "{\"type\": \"yarn\", \"rope_type\": \"yarn\", \"factor\": 4.0, \
                    \"original_max_position_embeddings\": 16}";
    let numerics = configured("llama", &format!("\"rope_scaling\": {scaling},"));
    let yarn = numerics.yarn.expect("it is read");
    assert_eq!((yarn.factor, yarn.original_positions, yarn.truncate), (4.0, 16, true));
    assert_eq!((yarn.beta_fast, yarn.beta_slow), (32.0, 1.0));
    let plain = configured("llama", "");
    let factor = numerics.score_scale() / plain.score_scale();
    assert!((factor - (0.1 * 4f64.ln() + 1.0).powi(2)).abs() < 1e-14);
    // DeepSeek's variant, and another kind: named, not computed.
    for other in ["\"mscale\": 1.0, \"rope_type\": \"yarn\"", "\"rope_type\": \"linear\""] {
        let of = format!("\"rope_scaling\": {{{other}, \"factor\": 4.0}},");
        let numerics = configured("llama", &of);
        assert_eq!((numerics.yarn, numerics.unknown), (None, vec!["rope_scaling".to_owned()]));
    }
}

/// The defaults of gpt-oss's class: only null switches its scaling off.
#[test]
fn gpt_oss_stretches_unless_told_not_to() {
    let experts = "\"num_local_experts\": 4, \"experts_per_token\": 2,";
    let yarn = configured("gpt_oss", experts).yarn.expect("its class has it");
    assert_eq!((yarn.factor, yarn.original_positions, yarn.truncate), (32.0, 4096, false));
    let off = configured("gpt_oss", &format!("{experts} \"rope_scaling\": null,"));
    assert_eq!((off.yarn, off.unknown), (None, vec![]));
}
