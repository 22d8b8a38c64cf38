//! Where the ticks of an axis go, and what stands beside them.

/// An axis from zero on, with ticks at round numbers; the last tick is its end.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Axis {
    pub(super) ticks: Vec<f64>,
    decimals: usize,
}

impl Axis {
    /// Covers everything up to `largest` with about so many steps of 1, 2 or 5 times a power of ten.
    pub(super) fn to(largest: f64, steps: f64) -> Self {
        let largest = if largest.is_finite() && largest > 0.0 { largest } else { 1.0 };
        let power = 10_f64.powf((largest / steps).log10().floor());
        let round = [1.0, 2.0, 5.0].map(|step| step * power);
        let step = round.into_iter().find(|step| largest / step <= steps).unwrap_or(10.0 * power);
        Self::of(step, largest)
    }

    /// The same for seconds: minutes and hours are divided as clocks are.
    pub(super) fn seconds(largest: f64, steps: f64) -> Self {
        if largest <= 60.0 {
            return Self::to(largest, steps);
        }
        let round = [15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0, 3_600.0, 7_200.0, 14_400.0];
        let step = round.into_iter().find(|step| largest / step <= steps * 1.25).unwrap_or(28_800.0);
        Self::of(step, largest)
    }

    fn of(step: f64, largest: f64) -> Self {
        // A hair less, so that 0.3 is not found to need a fourth step of 0.1.
        let last = (largest / step - 1e-9).ceil().max(1.0);
        let ticks = (0..).map(f64::from).take_while(|n| *n <= last).map(|n| n * step).collect();
        let decimals = (0..9).find(|d| (step * 10_f64.powi(*d)).fract().abs() < 1e-6).unwrap_or_default();
        Self { ticks, decimals: usize::try_from(decimals).unwrap_or_default() }
    }

    /// Its end.
    pub(super) fn end(&self) -> f64 {
        self.ticks.last().copied().unwrap_or(1.0)
    }

    /// What stands beside a tick.
    pub(super) fn label(&self, tick: f64) -> String {
        let text = format!("{tick:.*}", self.decimals);
        let (whole, fraction) = text.split_at(text.find('.').unwrap_or(text.len()));
        let digits = whole.len();
        let grouped = whole.char_indices().flat_map(|(at, digit)| {
            let comma = at > 0 && (digits - at).is_multiple_of(3);
            comma.then_some(',').into_iter().chain([digit])
        });
        grouped.chain(fraction.chars()).collect()
    }

    /// What stands beside a tick of seconds on a long axis: minutes, and seconds where they are not whole.
    pub(super) fn clock(&self, tick: f64) -> String {
        if self.end() <= 60.0 {
            return self.label(tick);
        }
        format!("{:.0}:{:02.0}", (tick / 60.0).floor(), tick % 60.0)
    }
}

#[cfg(test)]
mod tests {
    use super::Axis;

    fn labels(axis: &Axis) -> Vec<String> {
        axis.ticks.iter().map(|tick| axis.label(*tick)).collect()
    }

    #[test]
    fn ticks_are_round_and_cover_everything() {
        for (largest, expected) in [
            (1_013.0, &["0", "500", "1,000", "1,500"][..]),
            (43.0, &["0", "10", "20", "30", "40", "50"]),
            (0.3, &["0.0", "0.1", "0.2", "0.3"]),
            (0.021, &["0.000", "0.005", "0.010", "0.015", "0.020", "0.025"]),
            (5.0, &["0", "1", "2", "3", "4", "5"]),
            (1_200_000.0, &["0", "500,000", "1,000,000", "1,500,000"]),
        ] {
            assert_eq!(labels(&Axis::to(largest, 5.0)), expected);
        }
    }

    #[test]
    fn nothing_to_show_still_makes_an_axis() {
        for largest in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(Axis::to(largest, 5.0).end(), 1.0);
        }
    }

    #[test]
    fn minutes_are_divided_as_clocks_are() {
        let clocks = |largest| {
            let axis = Axis::seconds(largest, 10.0);
            axis.ticks.iter().map(|tick| axis.clock(*tick)).collect::<Vec<_>>()
        };
        assert_eq!(clocks(4.0), ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5", "3.0", "3.5", "4.0"]);
        assert_eq!(clocks(120.0), ["0:00", "0:15", "0:30", "0:45", "1:00", "1:15", "1:30", "1:45", "2:00"]);
        let ten = clocks(600.0);
        assert_eq!((ten.len(), &*ten[1], &*ten[10]), (11, "1:00", "10:00"));
    }
}
