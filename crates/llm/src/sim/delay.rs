//! How long something takes: always the same, or anew each time.

use serde::{Deserialize, Deserializer, de::Error};
use std::str::FromStr;
use std::time::Duration;

/// A time, or a range out of which it is drawn anew each time: `200ms`, `1.5s`, `100ms-2s`; a bare number is milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Delay {
    /// The shortest.
    pub min: Duration,
    /// The longest.
    pub max: Duration,
}

impl Delay {
    /// Always the same.
    #[must_use]
    pub fn fixed(time: Duration) -> Self {
        Self { min: time, max: time }
    }

    pub(crate) fn draw(self, dice: &mut fastrand::Rng) -> Duration {
        self.min + self.max.saturating_sub(self.min).mul_f64(dice.f64())
    }
}

impl FromStr for Delay {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let time = |part: &str| -> Result<Duration, String> {
            let part = part.trim();
            let (digits, unit) =
                part.split_at(part.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(part.len()));
            let scale = match unit.trim() {
                "" | "ms" => 1e-3,
                "s" => 1.0,
                "m" => 60.0,
                _ => f64::NAN,
            };
            let seconds = digits.parse::<f64>().map_or(f64::NAN, |value| value * scale);
            Duration::try_from_secs_f64(seconds)
                .map_err(|_| format!("not a time: {text:?}; write 200ms, 1.5s or 100ms-2s"))
        };
        let (min, max) = match text.split_once('-') {
            Some((min, max)) => (time(min)?, time(max)?),
            None => (time(text)?, time(text)?),
        };
        if min > max { Err(format!("{text:?} ends before it begins")) } else { Ok(Self { min, max }) }
    }
}

impl<'de> Deserialize<'de> for Delay {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum TextOrMs {
            Text(String),
            Ms(u64),
        }
        match TextOrMs::deserialize(deserializer)? {
            TextOrMs::Text(text) => text.parse().map_err(D::Error::custom),
            TextOrMs::Ms(ms) => Ok(Self::fixed(Duration::from_millis(ms))),
        }
    }
}
