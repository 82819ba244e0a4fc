//! The optimizer.

use super::{close, down, numbers, out, up};
use kernels::Cpu;
use kernels::adamw::{self, AdamW};
use kernels::cuda::{Gpu, Memory, Storage, Stored, bf16};

pub fn adamw(gpu: &Gpu) {
    in_each_storage!(adamw_in(gpu));
    unaligned(gpu);
}

/// Tensors that begin at any element, one of them empty.
fn unaligned(gpu: &Gpu) {
    let (cpu, at) = (Cpu::serial(), 3..4500);
    let step = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-8, step: 1, gradient_scale: 1.0 };
    let [w, g, m] = [1, 2, 3].map(|seed| numbers::<f32>(5000, seed));
    let v = vec![0.25; 5000];
    let [mut gw, gg, mut gm, mut gv] = [&w, &g, &m, &v].map(|tensor| up::<f32>(gpu, tensor));
    let (mut ew, mut em, mut ev) = (gw.view_mut(), gm.view_mut(), gv.view_mut());
    let mut parameters = Vec::new();
    for part in [0..0, at.clone()] {
        let len = part.end;
        let ((w, rest_w), (m, rest_m), (v, rest_v)) =
            (ew.split_at(len), em.split_at(len), ev.split_at(len));
        (ew, em, ev) = (rest_w, rest_m, rest_v);
        parameters.push(adamw::cuda::Parameter::<bf16> {
            w: w.into_slice(part.clone()),
            g: gg.view().slice(part.clone()),
            m: m.into_slice(part.clone()),
            v: v.into_slice(part),
            copy: None,
            decay: 0.1,
        });
    }
    adamw::cuda::update(gpu, &step, &mut parameters).unwrap();
    let [mut w, mut m, mut v] = [w, m, v];
    let parameter = adamw::Parameter {
        w: &mut w[at.clone()],
        g: &g[at.clone()],
        m: &mut m[at.clone()],
        v: &mut v[at],
        decay: 0.1,
    };
    adamw::reference::update(&cpu, &step, &mut [parameter]);
    for (what, found, expected) in [("w", gw, &w), ("m", gm, &m), ("v", gv, &v)] {
        close(&format!("unaligned {what}"), Storage::F32, &down(gpu, &found), expected);
    }
}

fn adamw_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    let step =
        AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.999, eps: 1e-8, step: 3, gradient_scale: 0.5 };
    // The second has no copy.
    let shapes = [(5000, 0.1), (33, 0.0), (70, 0.01)];
    let host: Vec<[Vec<f64>; 4]> = shapes
        .iter()
        .map(|&(elements, _)| {
            let [w, g, m] = [1, 2, 3].map(|seed| numbers::<f32>(elements, seed));
            let v = m.iter().map(|m| f64::from((m * m) as f32)).collect();
            [w, g, m, v]
        })
        .collect();
    let mut there: Vec<[Memory<f32>; 4]> = host
        .iter()
        .map(|tensors| tensors.each_ref().map(|tensor| up::<f32>(gpu, tensor)))
        .collect();
    let mut copies: Vec<Memory<S>> =
        shapes.iter().map(|&(elements, _)| out::<S>(gpu, elements)).collect();
    let mut proposed: Vec<Memory<f32>> =
        shapes.iter().map(|&(elements, _)| out::<f32>(gpu, elements)).collect();

    let mut proposals: Vec<adamw::cuda::Proposal<'_, S>> = there
        .iter()
        .zip(&mut proposed)
        .zip(shapes)
        .map(|(([w, g, m, v], to), (_, decay))| adamw::cuda::Proposal {
            to: to.view_mut(),
            w: w.view(),
            g: g.view(),
            m: m.view(),
            v: v.view(),
            copy: None,
            decay,
        })
        .collect();
    adamw::cuda::proposal(gpu, &step, &mut proposals).unwrap();
    let mut parameters: Vec<adamw::cuda::Parameter<'_, S>> = there
        .iter_mut()
        .zip(&mut copies)
        .zip(shapes)
        .map(|(([w, g, m, v], copy), (elements, decay))| adamw::cuda::Parameter {
            w: w.view_mut(),
            g: g.view(),
            m: m.view_mut(),
            v: v.view_mut(),
            copy: (elements != 33).then(|| copy.view_mut()),
            decay,
        })
        .collect();
    adamw::cuda::update(gpu, &step, &mut parameters).unwrap();

    for (number, (elements, decay)) in shapes.into_iter().enumerate() {
        let [mut w, g, mut m, mut v] = host[number].clone();
        let parameter = adamw::Parameter { w: &mut w, g: &g, m: &mut m, v: &mut v, decay };
        adamw::reference::update(&cpu, &step, &mut [parameter]);
        let [gw, _, gm, gv] = &there[number];
        for (what, found, expected) in [("w", gw, &w), ("m", gm, &m), ("v", gv, &v)] {
            close(&format!("{what} of {elements}"), Storage::F32, &down(gpu, found), expected);
        }
        if elements != 33 {
            close("copy", S::STORAGE, &down(gpu, &copies[number]), &w);
        }
        // Equal bits.
        assert_eq!(down(gpu, &proposed[number]), down(gpu, gw));
    }
}
