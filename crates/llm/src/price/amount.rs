//! An amount of dollars, exact: whole digits and where the point stands. Sums and products that do not fit are `None`, never
//! rounded.

use serde::{Deserialize, Deserializer, de};
use std::fmt;

/// Digits behind the point at most; the database takes as many of a cost.
const SCALE_MAX: u32 = 40;

/// An amount from zero up: `digits` × 10^-`scale`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Amount {
    digits: u128,
    scale: u32,
}

impl Amount {
    /// Nothing.
    pub const ZERO: Self = Self { digits: 0, scale: 0 };

    /// Reads decimal text: `12`, `0.15`, `1.5e-07`. `None`: it is none, is below zero, or has more digits than an amount can hold.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (number, exponent) = match text.split_once(['e', 'E']) {
            Some((number, exponent)) => (number, exponent.parse::<i32>().ok()?),
            None => (text, 0),
        };
        let (whole, part) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && part.is_empty() {
            return None;
        }
        let mut digits: u128 = 0;
        for digit in whole.chars().chain(part.chars()) {
            digits = digits.checked_mul(10)?.checked_add(u128::from(digit.to_digit(10)?))?;
        }
        let scale = i64::try_from(part.len()).ok()? - i64::from(exponent);
        Self { digits, scale: 0 }.with_scale(scale)
    }

    /// Puts the point so many digits from the right, and leaves out zeros at the end.
    fn with_scale(self, mut scale: i64) -> Option<Self> {
        let mut digits = self.digits;
        if digits == 0 {
            return Some(Self::ZERO);
        }
        while scale > 0 && digits.is_multiple_of(10) {
            (digits, scale) = (digits / 10, scale - 1);
        }
        while scale < 0 {
            (digits, scale) = (digits.checked_mul(10)?, scale + 1);
        }
        let scale = u32::try_from(scale).ok().filter(|scale| *scale <= SCALE_MAX)?;
        Some(Self { digits, scale })
    }

    /// A millionth: prices are told for a million tokens.
    #[must_use]
    pub fn millionth(self) -> Option<Self> {
        self.with_scale(i64::from(self.scale) + 6)
    }

    /// So many times.
    #[must_use]
    pub fn times(self, count: u64) -> Option<Self> {
        Self { digits: self.digits.checked_mul(count.into())?, scale: 0 }.with_scale(self.scale.into())
    }

    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Option<Self> {
        let scale = self.scale.max(other.scale);
        let digits = self.at_scale(scale)?.checked_add(other.at_scale(scale)?)?;
        Self { digits, scale: 0 }.with_scale(scale.into())
    }

    fn at_scale(self, scale: u32) -> Option<u128> {
        self.digits.checked_mul(10_u128.checked_pow(scale - self.scale)?)
    }
}

/// Plain decimal text, such as `0.00042`, without zeros at the end.
impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scale = self.scale as usize;
        if scale == 0 {
            return write!(f, "{}", self.digits);
        }
        let digits = format!("{:0>width$}", self.digits, width = scale + 1);
        let (whole, part) = digits.split_at(digits.len() - scale);
        write!(f, "{whole}.{part}")
    }
}

/// From decimal text, or from a number. A number is read as it was written, which is certain up to 15 digits; one with more
/// is refused and must be text.
impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AmountVisitor)
    }
}

struct AmountVisitor;

impl de::Visitor<'_> for AmountVisitor {
    type Value = Amount;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an amount of dollars from zero up, such as 0.15 or \"0.15\"")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Amount, E> {
        Amount::parse(text).ok_or_else(|| E::invalid_value(de::Unexpected::Other("text"), &self))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Amount, E> {
        Amount::parse(&number.to_string()).ok_or_else(|| E::invalid_value(de::Unexpected::Signed(number), &self))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Amount, E> {
        Ok(Amount { digits: number.into(), scale: 0 })
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Amount, E> {
        let text = number.to_string();
        let amount = Amount::parse(&text).ok_or_else(|| E::invalid_value(de::Unexpected::Float(number), &self))?;
        if amount.digits >= 10_u128.pow(15) {
            return Err(E::custom(
                "a number with more than 15 digits is not read exactly; write it as text, in quotes",
            ));
        }
        Ok(amount)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> Option<String> {
        Amount::parse(text).map(|amount| amount.to_string())
    }

    #[test]
    fn decimal_text_is_kept_to_the_last_digit() {
        for (text, expected) in [
            ("0", "0"),
            ("0.0", "0"),
            ("12", "12"),
            ("00.150", "0.15"),
            ("1.5e-07", "0.00000015"),
            ("7.5E-8", "0.000000075"),
            ("2.1500000000000002e-06", "0.0000021500000000000002"),
            ("3e+2", "300"),
            (".5", "0.5"),
            ("5.", "5"),
            ("1e-40", "0.0000000000000000000000000000000000000001"),
        ] {
            assert_eq!(read(text).as_deref(), Some(expected), "{text}");
        }
        for text in [
            "",
            ".",
            "-1",
            "+1",
            "1,5",
            "NaN",
            "inf",
            "1e",
            "e5",
            "1e-41",
            "1e99",
            "1e999999999999",
            "0x10",
            " 1",
            "1_000",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
        assert_eq!(read(&"9".repeat(40)), None);
    }

    #[test]
    fn what_does_not_fit_is_none() {
        let huge = Amount::parse(&u128::MAX.to_string()).unwrap();
        assert_eq!(huge.times(2), None);
        assert_eq!(huge.plus(huge), None);
        assert_eq!(huge.plus(Amount::parse("0.1").unwrap()), None);
        assert_eq!(Amount::parse("1e-40").unwrap().millionth(), None);
    }

    #[test]
    fn numbers_are_read_as_they_were_written() {
        #[derive(Deserialize, Debug)]
        struct Line {
            a: Amount,
        }
        let read = |value: &str| toml::from_str::<Line>(&format!("a = {value}")).map(|line| line.a.to_string());
        for (value, expected) in [
            ("0.15", "0.15"),
            ("3", "3"),
            ("1e-7", "0.0000001"),
            ("\"0.10\"", "0.1"),
            ("0.1234567890123", "0.1234567890123"),
        ] {
            assert_eq!(read(value).unwrap(), expected);
        }
        for (value, expected) in [
            ("-1", "an amount of dollars from zero up"),
            ("-0.5", "an amount of dollars"),
            ("nan", "an amount of dollars"),
            ("inf", "an amount of dollars"),
            ("\"cheap\"", "an amount of dollars"),
            ("true", "an amount of dollars"),
            ("0.12345678901234567", "more than 15 digits"),
        ] {
            let error = read(value).unwrap_err().to_string();
            assert!(error.contains(expected), "{value}: {error}");
        }
    }

    proptest! {
        #[test]
        fn arithmetic_is_that_of_whole_numbers(a in 0..10_u64.pow(12), b in 0..10_u64.pow(12), count in 0..10_u64.pow(12), scale in 0..20_u32) {
            let amount = |digits: u64| Amount::parse(&format!("{digits}e-{scale}")).unwrap();
            let expected = u128::from(a) * u128::from(count) + u128::from(b);
            let sum = amount(a).times(count).unwrap().plus(amount(b)).unwrap();
            prop_assert_eq!(sum, Amount::parse(&format!("{expected}e-{scale}")).unwrap());
            // The text has the same digits.
            let text = sum.to_string();
            let (whole, part) = text.split_once('.').unwrap_or((&text, ""));
            let part = format!("{part:0<width$}", width = scale as usize);
            prop_assert_eq!(format!("{whole}{part}").parse::<u128>().unwrap(), expected);
        }
    }
}
