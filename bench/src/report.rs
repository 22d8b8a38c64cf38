//! What comes out of a run: figures with everything that is needed to judge them, as values and as Markdown.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use serde::Serialize;

use crate::figure::{Compared, Sample};
pub use crate::figure::{Course, Figure, Ratio};
pub use crate::machine::Machine;
use crate::options::Scenario;
use crate::sizes::Sizes;

/// The samples of one round, by scenario.
pub(crate) type Round = Vec<(Scenario, Vec<Sample>)>;

/// A run.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The version of Posthouse.
    pub posthouse: &'static str,
    /// `release`, or `debug`, whose figures say little.
    pub build: &'static str,
    /// The version of the server.
    pub postgres: String,
    /// Whether the server was started for this run alone.
    pub private_server: bool,
    /// Settings of the server that matter here.
    pub server_settings: BTreeMap<String, String>,
    /// When it began, as RFC 3339.
    pub started_at: String,
    /// How long all of it took.
    pub seconds: f64,
    /// Measured rounds, after one of warm-up.
    pub repeats: u32,
    /// Small numbers, whose figures say little.
    pub quick: bool,
    /// Where it ran.
    pub machine: Machine,
    /// What was measured.
    pub scenarios: Vec<Measured>,
}

/// A scenario and its figures.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    /// Its name, as `--only` takes it.
    pub name: &'static str,
    /// What it did, with its numbers.
    pub meaning: String,
    /// What came out.
    pub figures: Vec<Figure>,
}

/// One scenario over all rounds.
pub(crate) fn scenario(scenario: Scenario, sizes: &Sizes, rounds: &[Round]) -> Measured {
    let names: Vec<_> =
        rounds.first().map(|round| samples(round, scenario).map(|s| s.name.clone()).collect()).unwrap_or_default();
    let figure = |name: &Cow<'static, str>| {
        let values = rounds.iter().filter_map(|round| {
            let sample = samples(round, scenario).find(|sample| sample.name == *name)?;
            let value = |of, name: &str| samples(round, of).find(|s| s.name == name).map(|sample| sample.value);
            let floor = sample.floor.and_then(|name| value(Scenario::Floor, name));
            let other = sample.other.and_then(|(scenario, name)| value(scenario, name));
            Some(Compared { sample, floor, other })
        });
        Figure::of(&values.collect::<Vec<_>>())
    };
    Measured {
        name: scenario.name(),
        meaning: scenario.meaning(sizes),
        figures: names.iter().filter_map(figure).collect(),
    }
}

fn samples(round: &Round, scenario: Scenario) -> impl Iterator<Item = &Sample> {
    round.iter().filter(move |(of, _)| *of == scenario).flat_map(|(_, samples)| samples)
}

impl Report {
    /// What a reader must know before the figures: a line each, most important first.
    #[must_use]
    pub fn caveats(&self) -> Vec<&'static str> {
        let caveats = [
            (self.build == "debug", "a debug build: the figures say little; build with --release"),
            (self.quick, "small numbers: the figures say whether it works, not how fast it is"),
            (
                self.machine.is_busy(),
                "the machine was busy with other things too: the ratios say more than the figures",
            ),
        ];
        caveats.into_iter().filter_map(|(holds, text)| holds.then_some(text)).collect()
    }

    /// The report as Markdown: settings, versions, machine, and a table; and a chart, if there is one at this address.
    #[must_use]
    pub fn markdown(&self, plot: Option<&str>) -> String {
        let mut text = String::from("# Posthouse benchmark\n\n");
        // Writing to a string cannot fail.
        let _ = self.write_markdown(&mut text);
        if let Some(plot) = plot {
            let _ = writeln!(text, "\n![Throughput and latency over time](<{plot}>)");
        }
        text
    }

    fn write_markdown(&self, text: &mut String) -> fmt::Result {
        let rounds = if self.repeats == 1 { "round" } else { "rounds" };
        let server = if self.private_server { ", a private server" } else { "" };
        writeln!(text, "- Posthouse {}, {} build", self.posthouse, self.build)?;
        writeln!(text, "- PostgreSQL {}{server}", self.postgres)?;
        let settings: Vec<_> = self.server_settings.iter().map(|(name, value)| format!("{name} = {value}")).collect();
        writeln!(text, "- {}", settings.join(", "))?;
        writeln!(text, "- {}", self.machine)?;
        writeln!(
            text,
            "- {}, {} {rounds} after a warm-up, {:.0} s in all",
            self.started_at, self.repeats, self.seconds
        )?;
        for caveat in self.caveats() {
            writeln!(text, "- Mind: {caveat}")?;
        }
        text.push_str("\n| Scenario | Figure | Median | Lowest to highest | Ratios |\n|---|---|--:|--:|--:|\n");
        for scenario in &self.scenarios {
            for figure in &scenario.figures {
                let [median, spread, ratio] = figure.texts();
                writeln!(text, "| {} | {} | {median} | {spread} | {ratio} |", scenario.name, figure.name)?;
            }
        }
        text.push('\n');
        for scenario in &self.scenarios {
            writeln!(text, "- **{}**: {}", scenario.name, scenario.meaning)?;
        }
        Ok(())
    }
}
