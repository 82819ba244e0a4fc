//! Windows of attention.

use serde_yaml::Spanned;

use super::{Reader, implied, unplaced};
use crate::input::InputError;
use crate::model::raw::{Maybe, RawWindow};
use crate::text::quotable;

impl Reader<'_> {
    /// The window as given; `default` where the key is missing.
    pub(super) fn window(&self, default: Maybe<u64>, full_every: Maybe<u64>) -> Option<RawWindow> {
        let tokens = self.config.sliding_window.clone().unwrap_or(default)?;
        // A period of 1 stands for "no layer is windowed".
        let none = full_every.as_ref().is_some_and(|every| every.value == 1);
        (!none).then_some(RawWindow { tokens, full_every })
    }

    /// Qwen's window: only with `use_sliding_window`, from layer `max_window_layers` on.
    pub(super) fn switched_window(&self) -> Result<Option<RawWindow>, InputError> {
        let config = self.config;
        self.layer_types_are_known()?;
        if !config.use_sliding_window.as_ref().is_some_and(|switch| switch.value) {
            return Ok(None);
        }
        if let Some(every) = self.full_every()? {
            return Ok(self.window(implied(4096), every));
        }
        let layers = self.need("num_hidden_layers", &config.num_hidden_layers)?.value;
        let first = config.max_window_layers.clone().unwrap_or_else(|| unplaced(28));
        match first.value {
            0 => Ok(self.window(implied(4096), None)),
            full if full >= layers => Ok(None),
            _ => Err(self.windows_some_layers(first.value, layers)),
        }
    }

    /// At `max_window_layers`, or at the switch where the file leaves that out.
    fn windows_some_layers(&self, first: u64, layers: u64) -> InputError {
        let config = self.config;
        let says = |of: &str| format!("`max_window_layers` ({of}) windows only the last layers");
        let error = match (&config.max_window_layers, &config.use_sliding_window) {
            (None, Some(switch)) => {
                self.error(switch, says(&format!("{first}, the default where it is missing")))
            }
            (given, _) => {
                self.error(given.as_ref().unwrap_or(&unplaced(first)), says(&first.to_string()))
            }
        };
        error
            .help(format!("valid: 0 (all windowed) or {layers} (none); a mixture is not supported"))
    }

    /// Refuses kinds of layers other than full and windowed, and another number of them than there
    /// are layers.
    fn layer_types_are_known(&self) -> Result<(), InputError> {
        let Some(types) = &self.config.layer_types else { return Ok(()) };
        let known = ["full_attention", "sliding_attention"];
        if let Some(other) = types.value.iter().find(|kind| !known.contains(&kind.as_str())) {
            let message = format!("`layer_types` cannot have `{}`", quotable(other));
            return Err(self.error(types, message).help(format!("valid: {}", known.join(", "))));
        }
        let layers = self.need("num_hidden_layers", &self.config.num_hidden_layers)?.value;
        let given = types.value.len();
        if given as u64 == layers {
            return Ok(());
        }
        let message = format!("`layer_types` has {given} layers, and the model {layers}");
        Err(self.error(types, message).help(format!("valid: {layers}, one of each layer")))
    }

    /// `layer_types` as a period: `None` not given, `Some(None)` all windowed, `Some(Some(1))`
    /// none, `Some(Some(k))` every k-th full.
    pub(super) fn full_every(&self) -> Result<Option<Maybe<u64>>, InputError> {
        self.layer_types_are_known()?;
        let Some(types) = &self.config.layer_types else { return Ok(None) };
        let full = |kind: &String| kind == "full_attention";
        let Some(first) = types.value.iter().position(full) else { return Ok(Some(None)) };
        let period = first + 1;
        let regular =
            types.value.iter().enumerate().all(|(i, kind)| full(kind) == ((i + 1) % period == 0));
        if regular {
            return Ok(Some(Some(Spanned::new(period as u64, types.referenced, types.defined))));
        }
        Err(self
            .error(types, "`layer_types` has no period that is supported".to_owned())
            .help("valid: every k-th layer full_attention, the others sliding_attention"))
    }
}
