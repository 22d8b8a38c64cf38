//! The bad moments of the simulated provider: which texts meet them, and how long the workers wait for what.

use std::path::Path;
use std::time::Duration;

use posthouse_llm::sim::{Delay, Fault, Script, Step};

/// A worker is given up so soon after its last sign of life. The default is 30 s; a demo cannot wait for that.
pub(super) const LEASE: Duration = Duration::from_secs(2);
/// Long enough for the latency spike.
const FIRST_TOKEN: Duration = Duration::from_secs(6);
/// Short, so that the hang is cut while one watches.
const BETWEEN_TOKENS: Duration = Duration::from_millis(2_500);
/// The latency spike: about three times the usual.
const SPIKE: Duration = Duration::from_millis(3_500);
/// What a 429 asks for.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// So many texts are needed for the whole show.
pub(super) const SHOW_MIN: usize = 8;

/// What happens to which text, by its place in the list. The last third of the texts is enqueued after a worker was killed, so
/// that what happens there happens to the others.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Trouble {
    /// Refused for good: too long for the model.
    pub(super) refused: Option<usize>,
    /// 429 at the first try.
    pub(super) rate_limited: Vec<usize>,
    /// Hangs in the middle of the answer at the first try.
    pub(super) hangs: Option<usize>,
    /// Answered late.
    pub(super) spike: Option<usize>,
    /// The stream is cut at the first try.
    pub(super) cut: Option<usize>,
    /// How many texts are enqueued at the beginning.
    pub(super) first_wave: usize,
}

impl Trouble {
    /// Trouble for so many texts: less of it for few.
    pub(super) fn plan(texts: usize) -> Self {
        let first_wave = if texts < SHOW_MIN { texts } else { texts - texts / 3 };
        let mut trouble = Self { first_wave, ..Self::default() };
        if texts >= 3 {
            trouble.refused = Some(1);
        }
        if texts >= SHOW_MIN {
            trouble.rate_limited = vec![3, 4];
            trouble.hangs = Some(first_wave);
            trouble.spike = Some(first_wave + 1);
        }
        if texts >= 12 {
            trouble.cut = Some(first_wave + 2);
        }
        trouble
    }

    /// No trouble: the provider is a real one.
    pub(super) fn none(texts: usize) -> Self {
        Self { first_wave: Self::plan(texts).first_wave, ..Self::default() }
    }

    /// What the simulated provider is told.
    pub(super) fn script(&self, texts: &[String]) -> Script {
        let at = |place: usize, fault| Step { input: Some(texts[place].clone()), ..Step::always(fault) };
        let once = |place, fault| Step { tries: Some(1), ..at(place, fault) };
        let mut steps = Vec::new();
        steps.extend(self.refused.map(|place| at(place, Fault::ContextLength)));
        steps.extend(self.rate_limited.iter().map(|&place| Step {
            retry_after: Some(Delay::fixed(RETRY_AFTER)),
            latency: Some(Delay::default()),
            ..once(place, Fault::Status(429))
        }));
        steps.extend(self.hangs.map(|place| Step { after_tokens: Some(4), ..once(place, Fault::HangMid) }));
        steps.extend(self.spike.map(|place| Step { latency: Some(Delay::fixed(SPIKE)), ..at(place, Fault::Ok) }));
        steps.extend(self.cut.map(|place| Step { after_tokens: Some(5), ..once(place, Fault::Cut) }));
        let ms = Duration::from_millis;
        Script {
            latency: Delay { min: ms(200), max: ms(900) },
            first_token: Delay { min: ms(100), max: ms(300) },
            tokens_per_second: Some(40.0),
            seed: 7,
            steps,
            ..Script::default()
        }
    }
}

/// Writes the workers' configuration.
pub(super) fn write_config(file: &Path, provider_url: &str) -> std::io::Result<()> {
    let text = format!(
        "[providers.simulated]\nbase_url = \"{provider_url}\"\n\n\
         [models.sim]\nprovider = \"simulated\"\n\n\
         [models.sim.timeouts]\nfirst_token_ms = {}\nbetween_tokens_ms = {}\n",
        FIRST_TOKEN.as_millis(),
        BETWEEN_TOKENS.as_millis()
    );
    std::fs::write(file, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_trouble_has_a_text_of_its_own() {
        for texts in 1..60 {
            let trouble = Trouble::plan(texts);
            let mut places: Vec<usize> =
                [trouble.refused, trouble.hangs, trouble.spike, trouble.cut].into_iter().flatten().collect();
            places.extend(&trouble.rate_limited);
            let scripted = places.len();
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), scripted, "{texts} texts: {trouble:?}");
            assert!(places.iter().all(|&place| place < texts), "{texts} texts: {trouble:?}");
            assert!((1..=texts).contains(&trouble.first_wave));
            let list: Vec<String> = (0..texts).map(|i| format!("Text {i}.")).collect();
            assert_eq!(trouble.script(&list).steps.len(), scripted);
        }
    }

    #[test]
    fn the_configuration_is_one_that_workers_read() {
        let file = std::env::temp_dir().join(format!("posthouse-demo-{}.toml", std::process::id()));
        let written = write_config(&file, "http://127.0.0.1:1/v1");
        let read = posthouse_llm::Config::load(&file);
        std::fs::remove_file(&file).ok();
        assert!(written.is_ok() && read.is_ok(), "{written:?} {read:?}");
    }
}
