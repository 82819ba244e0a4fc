//! One test body for all implementations; a new one adds a module here.

macro_rules! implementation {
    ($name:ident: $($path:tt)*) => {
        #[allow(unused_qualifications)] // for the reference itself
        mod $name {
            use kernels::$($path)*;
            include!("gradients.rs");
        }
    };
}

implementation!(reference: {
    activation::reference as activation, attention::reference as attention, cross_entropy::reference as cross_entropy,
    dropout::reference as dropout, elementwise::reference as elementwise, embedding::reference as embedding,
    gemm::reference as gemm, latent_heads::reference as latent_heads, layer_norm::reference as layer_norm, rms_norm::reference as rms_norm, rope::reference as rope,
    sinks::reference as sinks,
    transpose::reference as transpose
});

implementation!(fast: {
    activation, attention, cross_entropy, dropout, elementwise, embedding, gemm, latent_heads, layer_norm, rms_norm, rope, sinks, transpose
});
