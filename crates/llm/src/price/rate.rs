//! What calls of a model cost: rates for its tokens, and the exact cost of a call by them.

use super::amount::Amount;
use crate::answer::Usage;
use crate::config::prices::ModelPrice;

/// Dollars for one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rates {
    pub(super) input: Amount,
    pub(super) output: Amount,
    /// `None`: as `input`.
    pub(super) cached_input: Option<Amount>,
}

/// What calls of a model cost.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Price {
    pub(super) base: Rates,
    /// Of requests with more tokens of prompt than this, in growing order.
    pub(super) above: Vec<(u64, Rates)>,
    pub(super) per_request: Amount,
}

impl Price {
    pub(super) fn of_model(price: &ModelPrice) -> Option<Self> {
        let base = Rates {
            input: price.input.millionth()?,
            output: price.output.millionth()?,
            cached_input: match price.cached_input {
                Some(price) => Some(price.millionth()?),
                None => None,
            },
        };
        Some(Self { base, above: Vec::new(), per_request: price.per_request.unwrap_or(Amount::ZERO) })
    }

    /// `None`: a count is missing, or the cost has more digits than fit.
    pub(super) fn cost(&self, usage: &Usage) -> Option<Amount> {
        let (input, output) = (usage.input_tokens?, usage.output_tokens?);
        let cached = usage.cached_tokens.unwrap_or(0).min(input);
        let rates = self.above.iter().rev().find(|(least, _)| input > *least).map_or(self.base, |(_, rates)| *rates);
        let fresh = rates.input.times(input - cached)?;
        let cached = rates.cached_input.unwrap_or(rates.input).times(cached)?;
        fresh.plus(cached)?.plus(rates.output.times(output)?)?.plus(self.per_request)
    }
}
