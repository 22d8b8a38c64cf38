//! From single measurements to medians, spreads and ratios to the floor.

use std::borrow::Cow;

use serde::Serialize;

use crate::options::Scenario;

/// One measurement of one round.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    pub(crate) name: Cow<'static, str>,
    pub(crate) unit: &'static str,
    pub(crate) value: f64,
    /// The figure of the floor that it is compared with.
    pub(crate) floor: Option<&'static str>,
    /// Another figure of the same round that it is compared with too.
    pub(crate) other: Option<(Scenario, &'static str)>,
    pub(crate) course: Option<Course>,
}

/// How something went over the time of one measurement: a line of a chart.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Course {
    /// What the line tells, the same for all lines that belong into one chart: `throughput`.
    pub of: &'static str,
    /// The unit of its values.
    pub unit: &'static str,
    /// What sets the line apart from others of the chart.
    pub line: String,
    /// Seconds since the start, and the value then; in the order of time.
    pub points: Vec<(f64, f64)>,
}

impl Sample {
    pub(crate) fn new(name: impl Into<Cow<'static, str>>, unit: &'static str, value: f64) -> Self {
        Self { name: name.into(), unit, value, floor: None, other: None, course: None }
    }

    /// So many in so much time.
    pub(crate) fn rate(name: impl Into<Cow<'static, str>>, count: u32, seconds: f64) -> Self {
        Self::new(name, "1/s", f64::from(count) / seconds)
    }

    pub(crate) fn against(self, floor: &'static str) -> Self {
        Self { floor: Some(floor), ..self }
    }

    pub(crate) fn with_course(self, course: Course) -> Self {
        Self { course: Some(course), ..self }
    }

    /// Also compared with a figure of the same round, of whichever scenario.
    pub(crate) fn beside(self, scenario: Scenario, figure: &'static str) -> Self {
        Self { other: Some((scenario, figure)), ..self }
    }
}

/// A sample with what it is compared with, as far as that was measured in the same round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Compared<'a> {
    pub(crate) sample: &'a Sample,
    pub(crate) floor: Option<f64>,
    pub(crate) other: Option<f64>,
}

/// A figure over all rounds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figure {
    /// What was measured.
    pub name: Cow<'static, str>,
    /// `1/s`, `ms`, `s`, `MiB`, or empty for a count.
    pub unit: &'static str,
    /// The middle one of `values`; the mean of the middle two of an even number.
    pub median: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
    /// One value a round, in the order of the rounds.
    pub values: Vec<f64>,
    /// How it compares with the floor. `None`: there is nothing to compare it with, or the floor was not measured.
    pub floor: Option<Ratio>,
    /// How it compares with another figure of the same rounds. `None`: there is nothing to compare it with, or that figure
    /// was not measured.
    pub other: Option<Ratio>,
    /// How it went over the time of each round. Empty for most.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub courses: Vec<Course>,
}

/// A figure divided by another one. For rates more is better, for times less.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ratio {
    /// The other figure; with its scenario in front unless that is the floor.
    pub figure: Cow<'static, str>,
    /// The median of the ratios of each round, each to the other figure of the same round.
    pub ratio: f64,
}

impl Figure {
    /// From one sample a round.
    pub(crate) fn of(rounds: &[Compared<'_>]) -> Option<Self> {
        let first = rounds.first()?.sample;
        let values: Vec<f64> = rounds.iter().map(|round| round.sample.value).collect();
        let ratio = |to: fn(&Compared<'_>) -> Option<f64>| {
            let ratios = rounds.iter().filter_map(|round| Some(round.sample.value / to(round).filter(|to| *to > 0.0)?));
            median(&ratios.collect::<Vec<_>>())
        };
        let other = first.other.map(|(scenario, figure)| match scenario {
            Scenario::Floor => figure.into(),
            _ => format!("{scenario}: {figure}").into(),
        });
        Some(Self {
            name: first.name.clone(),
            unit: first.unit,
            median: median(&values)?,
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            floor: first.floor.zip(ratio(|r| r.floor)).map(|(figure, ratio)| Ratio { figure: figure.into(), ratio }),
            other: other.zip(ratio(|r| r.other)).map(|(figure, ratio)| Ratio { figure, ratio }),
            courses: rounds.iter().filter_map(|round| round.sample.course.clone()).collect(),
            values,
        })
    }
}

impl Figure {
    /// Median with its unit, lowest to highest, and the ratios, for people. The last two may be empty.
    #[must_use]
    pub fn texts(&self) -> [String; 3] {
        let unit = if self.unit.is_empty() { String::new() } else { format!(" {}", self.unit) };
        let ratios: Vec<_> = [&self.floor, &self.other]
            .into_iter()
            .flatten()
            .map(|r| format!("{:.2} of {}", r.ratio, r.figure))
            .collect();
        let spread =
            if self.min < self.max { format!("{} to {}", number(self.min), number(self.max)) } else { String::new() };
        [format!("{}{unit}", number(self.median)), spread, ratios.join(", ")]
    }
}

/// Three digits or more, thousands apart.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        small if small < 10.0 && value.fract() != 0.0 => format!("{value:.2}"),
        small if small < 100.0 && value.fract() != 0.0 => format!("{value:.1}"),
        large if large < 10_000.0 => format!("{value:.0}"),
        _ => {
            let mut digits = format!("{value:.0}");
            for at in (1..digits.len()).rev().filter(|at| (digits.len() - at) % 3 == 0).collect::<Vec<_>>() {
                digits.insert(at, ',');
            }
            digits
        }
    }
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

fn median(values: &[f64]) -> Option<f64> {
    let sorted = sorted(values);
    let upper = *sorted.get(sorted.len() / 2)?;
    Some(if sorted.len() % 2 == 1 { upper } else { f64::midpoint(sorted[sorted.len() / 2 - 1], upper) })
}

/// The samples `p50`, `p95` and `p99`, in ms.
pub(crate) fn percentiles(names: [&'static str; 3], milliseconds: &[f64]) -> Vec<Sample> {
    let sorted = sorted(milliseconds);
    let at = |percent: usize| sorted.get(sorted.len() * percent / 100).copied().unwrap_or(f64::NAN);
    [50, 95, 99].into_iter().zip(names).map(|(percent, name)| Sample::new(name, "ms", at(percent))).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_ratio_is_taken_round_by_round() {
        let samples = [1.0, 8.0, 3.0]
            .map(|value| Sample::new("jobs", "1/s", value).against("commits").beside(Scenario::Drain, "done"));
        let rounds: Vec<_> = samples
            .iter()
            .zip([2.0, 4.0, 1.0])
            .map(|(sample, floor)| Compared { sample, floor: Some(floor), other: Some(sample.value * floor) })
            .collect();
        let figure = Figure::of(&rounds).unwrap();
        assert_eq!((figure.median, figure.min, figure.max), (3.0, 1.0, 8.0));
        assert_eq!(figure.floor, Some(Ratio { figure: "commits".into(), ratio: 2.0 }));
        assert_eq!(figure.other, Some(Ratio { figure: "drain: done".into(), ratio: 0.5 }));
        assert_eq!(figure.texts()[2], "2.00 of commits, 0.50 of drain: done");
    }

    #[test]
    fn without_a_floor_there_is_no_ratio() {
        let sample = &Sample::new("jobs", "1/s", 5.0).against("commits").beside(Scenario::Floor, "copied");
        let figure = Figure::of(&[Compared { sample, floor: None, other: None }]).unwrap();
        assert_eq!((&figure.floor, &figure.other), (&None, &None));
        assert_eq!(figure.texts()[2], "");
        assert_eq!(Figure::of(&[]), None);
    }

    #[test]
    fn numbers_are_readable() {
        let texts = [0.123, 12.34, 5.0, 1234.5, 45_678.9, 1_032_892.0].map(number);
        assert_eq!(texts, ["0.12", "12.3", "5", "1234", "45,679", "1,032,892"]);
    }

    #[test]
    fn the_median_of_two_lies_between_them() {
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let values: Vec<f64> = (0..200).rev().map(f64::from).collect();
        let found: Vec<f64> = percentiles(["p50", "p95", "p99"], &values).iter().map(|s| s.value).collect();
        assert_eq!(found, [100.0, 190.0, 198.0]);
    }
}
