//! When a schedule is due: a cron rule in a time zone, as Vixie cron reads it.
//!
//! Pure: it knows no clock. A *tick* is a moment at which a rule is due; ticks are whole minutes of the zone's wall clock, counted
//! here in seconds since 1970. When clocks change, a rule that names its minutes and hours runs once, as people expect of "at half
//! past two": at the end of the gap if its time is skipped, the first time if it comes twice. One with `*` in minute or hour runs
//! at every moment that matches, as expected of "every ten minutes".

use std::time::{Duration, SystemTime};

use croner::Cron;
use croner::errors::CronError;
use croner::parser::{CronParser, Seconds, Year};
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};

use crate::error::{Error, Result};

/// The fields of a rule, and what they may hold.
const FIELDS: [(&str, &str, u16); 5] = [
    ("minute", "0 to 59", 60),
    ("hour", "0 to 23", 24),
    ("day of the month", "1 to 31, L (the last), 15W (the weekday nearest to the 15th)", 31),
    ("month", "1 to 12, or JAN to DEC", 12),
    ("day of the week", "0 to 7 (0 and 7 are Sunday), SUN to SAT, 5L (the last Friday), 1#2 (the second Monday)", 8),
];

const NICKNAMES: [(&str, &str); 7] = [
    ("@yearly", "0 0 1 1 *"),
    ("@annually", "0 0 1 1 *"),
    ("@monthly", "0 0 1 * *"),
    ("@weekly", "0 0 * * 0"),
    ("@daily", "0 0 * * *"),
    ("@midnight", "0 0 * * *"),
    ("@hourly", "0 * * * *"),
];

/// A cron rule in a time zone.
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use posthouse::cron::Rule;
/// let rule = Rule::parse("30 2 * * MON-FRI", "Europe/Rome")?;
/// let monday = SystemTime::UNIX_EPOCH + Duration::from_secs(1_806_364_800);    // 2027-03-30 00:00 UTC
/// assert_eq!(rule.local(rule.after(monday).unwrap()), "2027-03-30 02:30 +02:00");
/// # Ok::<(), posthouse::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Rule {
    cron: Cron,
    zone: TimeZone,
    /// Minutes and hours are named, without `*`.
    is_fixed: bool,
}

impl Rule {
    /// Reads a rule: five fields (minute, hour, day of the month, month, day of the week), or a nickname such as `@daily`; and
    /// the name of a time zone, such as `UTC` or `Europe/Rome`. If both days are named, either will do. An error names the field
    /// that is wrong; a rule that is never due is one.
    pub fn parse(cron: &str, timezone: &str) -> Result<Self> {
        let rule = Self::stored(&fields_of(cron)?.join(" "), timezone)?;
        // Of February 29 the next may be eight years away, of one on a Monday forty.
        if rule.next(0).is_none() {
            return Err(Error::invalid(format!("cron: '{cron}' is never due: no month has such a day")));
        }
        Ok(rule)
    }

    /// Reads a rule that was checked when it was stored, which may have seconds.
    pub(crate) fn stored(cron: &str, timezone: &str) -> Result<Self> {
        let expanded = nickname(cron).unwrap_or(cron).replace('?', "*");
        let fields: Vec<&str> = expanded.split_whitespace().collect();
        let [.., minute, hour, day, _, weekday] = fields.as_slice() else {
            return Err(Error::invalid(format!("cron: '{cron}' has not five fields")));
        };
        // As in Vixie cron: either day will do, unless one is written with a star.
        let both_days = day.starts_with('*') || weekday.starts_with('*');
        let cron =
            parser().dom_and_dow(both_days).build().parse(&expanded).map_err(|error| match fields_of(&expanded) {
                Err(named) if fields.len() == FIELDS.len() => named,
                _ => Error::invalid(format!("cron: '{cron}': {}", said(&error))),
            })?;
        let zone = TimeZone::get(timezone).map_err(|_| {
            Error::invalid(format!(
                "timezone: there is no time zone '{timezone}'; write a name such as UTC, Europe/Rome or America/New_York"
            ))
        })?;
        let is_fixed = !minute.starts_with('*') && !hour.starts_with('*');
        Ok(Self { cron, zone, is_fixed })
    }

    /// The first moment after this one at which it is due. `None`: it never is again.
    pub fn after(&self, time: SystemTime) -> Option<SystemTime> {
        let seconds = time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs().cast_signed());
        let next = u64::try_from(self.next(seconds)?).ok()?;
        Some(SystemTime::UNIX_EPOCH + Duration::from_secs(next))
    }

    /// A time as the clocks of its zone show it, with the distance to UTC: `2027-01-31 08:00 +01:00`.
    pub fn local(&self, time: SystemTime) -> String {
        Timestamp::try_from(time).map_or_else(
            |_| "out of range".to_owned(),
            |time| time.to_zoned(self.zone.clone()).strftime("%Y-%m-%d %H:%M %:z").to_string(),
        )
    }

    /// The first tick after this second.
    pub(crate) fn next(&self, after: i64) -> Option<i64> {
        let start = Timestamp::from_second(after).ok()?;
        let local = start.to_zoned(self.zone.clone());
        if !self.is_fixed {
            return self.cron.find_next_occurrence(&local, false).ok().map(|tick: Zoned| tick.timestamp().as_second());
        }
        // Over the wall clock, where every time comes once. What is skipped comes to the end of the gap, together with the next.
        let mut civil: DateTime = local.datetime();
        loop {
            civil = self.cron.find_next_occurrence(&civil, false).ok()?;
            let tick = self.instant(civil)?;
            if tick > start {
                return Some(tick.as_second());
            }
        }
    }

    /// When a time of the wall clock is: the first time if it comes twice, the end of the gap if it is skipped.
    fn instant(&self, civil: DateTime) -> Option<Timestamp> {
        let ambiguous = self.zone.to_ambiguous_timestamp(civil);
        if let jiff::tz::AmbiguousOffset::Gap { before, .. } = ambiguous.offset() {
            // As if clocks had not changed yet, this is in the hour after they did.
            let late = before.to_timestamp(civil).ok()?.checked_add(jiff::SignedDuration::from_secs(1)).ok()?;
            return self.zone.preceding(late).next().map(|change| change.timestamp());
        }
        ambiguous.earlier().ok()
    }
}

fn parser() -> croner::parser::CronParserBuilder {
    CronParser::builder().seconds(Seconds::Optional).year(Year::Disallowed)
}

fn nickname(cron: &str) -> Option<&'static str> {
    NICKNAMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(cron.trim())).map(|(_, rule)| *rule)
}

/// The fields of a rule that somebody wrote, each looked at by itself, so that an error can name it.
fn fields_of(cron: &str) -> Result<Vec<&str>> {
    let refused = |what: String| Err(Error::invalid(format!("cron: {what}")));
    if cron.trim().starts_with('@') && nickname(cron).is_none() {
        let names: Vec<&str> = NICKNAMES.iter().map(|(name, _)| *name).collect();
        return refused(format!("'{}' is no nickname; there are {}", cron.trim(), names.join(", ")));
    }
    let fields: Vec<&str> = nickname(cron).unwrap_or(cron).split_whitespace().collect();
    if fields.len() != FIELDS.len() {
        return refused(format!(
            "'{cron}' has {}; write five (minute, hour, day of the month, month, day of the week), such as '30 8 * * MON-FRI'",
            if fields.len() == 1 { "one field".to_owned() } else { format!("{} fields", fields.len()) }
        ));
    }
    for (at, (field, (name, range, values))) in fields.iter().zip(FIELDS).enumerate() {
        let mut alone = ["*"; FIELDS.len()];
        alone[at] = *field;
        let problem = match parser().build().parse(&alone.join(" ")) {
            Err(error) => Some(said(&error)),
            Ok(_) => oversight(field, values),
        };
        if let Some(problem) = problem {
            return refused(format!(
                "{name}: '{field}': {problem}; allowed are {range}, lists (1,2), ranges (1-5), steps (*/2)"
            ));
        }
    }
    Ok(fields)
}

/// What the parser lets pass though it cannot be meant.
fn oversight(field: &str, values: u16) -> Option<String> {
    for item in field.split(',') {
        if item.is_empty() {
            return Some("a list has a gap".to_owned());
        }
        let step = item.split_once('/').and_then(|(_, step)| step.parse::<u16>().ok());
        if step.is_some_and(|step| step >= values) {
            return Some("the step is larger than the whole".to_owned());
        }
    }
    None
}

/// What the parser said, in our words.
fn said(error: &CronError) -> String {
    let text = error.to_string();
    let text = text.trim_start_matches("Component error: ").trim_start_matches("Pattern contains illegal characters: ");
    let text = text.trim_start_matches("Invalid pattern: ").trim_start_matches("CronPattern ").trim_end_matches('.');
    let mut letters = text.chars();
    letters.next().map(|first| first.to_lowercase().chain(letters).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn at(utc: &str) -> SystemTime {
        humantime::parse_rfc3339_weak(utc).unwrap()
    }

    /// The first ticks after a moment, as the zone's clocks show them.
    fn ticks(cron: &str, zone: &str, after: &str, n: usize) -> Vec<String> {
        let rule = Rule::parse(cron, zone).unwrap();
        let mut time = at(after);
        let next = |time: &mut SystemTime| {
            *time = rule.after(*time)?;
            Some(rule.local(*time))
        };
        (0..n).map_while(|_| next(&mut time)).collect()
    }

    /// What Vixie cron does when clocks change, in three zones: by one hour at night, by half an hour, at midnight.
    #[test]
    fn when_clocks_change_a_named_time_comes_once_and_a_star_by_every_clock_that_ticks() {
        let (berlin, new_york) = ("Europe/Berlin", "America/New_York");
        let (lord_howe, cairo) = ("Australia/Lord_Howe", "Africa/Cairo");
        for (cron, zone, after, expected) in [
            // 02:00 becomes 03:00 on 2027-03-28.
            ("30 2 * * *", berlin, "2027-03-27T12:00:00Z", "2027-03-28 03:00 +02:00, 2027-03-29 02:30 +02:00"),
            ("0 2 * * *", berlin, "2027-03-27T12:00:00Z", "2027-03-28 03:00 +02:00, 2027-03-29 02:00 +02:00"),
            ("30 1 * * *", berlin, "2027-03-27T12:00:00Z", "2027-03-28 01:30 +01:00, 2027-03-29 01:30 +02:00"),
            ("0 3 * * *", berlin, "2027-03-27T12:00:00Z", "2027-03-28 03:00 +02:00, 2027-03-29 03:00 +02:00"),
            // Three names in the gap and one at its end are one run.
            ("0,20,40 2,3 * * 0", berlin, "2027-03-27T12:00:00Z", "2027-03-28 03:00 +02:00, 2027-03-28 03:20 +02:00"),
            ("*/30 * * * *", berlin, "2027-03-28T00:20:00Z", "2027-03-28 01:30 +01:00, 2027-03-28 03:00 +02:00"),
            ("30 * * * *", berlin, "2027-03-28T00:20:00Z", "2027-03-28 01:30 +01:00, 2027-03-28 03:30 +02:00"),
            ("* 2 * * *", berlin, "2027-03-28T00:20:00Z", "2027-03-29 02:00 +02:00, 2027-03-29 02:01 +02:00"),
            // 03:00 becomes 02:00 on 2027-10-31.
            ("30 2 * * *", berlin, "2027-10-30T12:00:00Z", "2027-10-31 02:30 +02:00, 2027-11-01 02:30 +01:00"),
            (
                "15,45 2 * * *",
                berlin,
                "2027-10-30T12:00:00Z",
                "2027-10-31 02:15 +02:00, 2027-10-31 02:45 +02:00, 2027-11-01 02:15 +01:00",
            ),
            ("0 3 * * *", berlin, "2027-10-30T12:00:00Z", "2027-10-31 03:00 +01:00"),
            (
                "30 * * * *",
                berlin,
                "2027-10-31T00:00:00Z",
                "2027-10-31 02:30 +02:00, 2027-10-31 02:30 +01:00, 2027-10-31 03:30 +01:00",
            ),
            (
                "*/30 2 * * *",
                berlin,
                "2027-10-31T00:00:00Z",
                "2027-10-31 02:30 +02:00, 2027-10-31 02:00 +01:00, 2027-10-31 02:30 +01:00, 2027-11-01 02:00 +01:00",
            ),
            // A start within the second pass of the hour.
            ("30 2 * * *", berlin, "2027-10-31T01:10:00Z", "2027-11-01 02:30 +01:00"),
            ("30 * * * *", berlin, "2027-10-31T01:10:00Z", "2027-10-31 02:30 +01:00, 2027-10-31 03:30 +01:00"),
            ("@hourly", new_york, "2027-03-14T05:30:00Z", "2027-03-14 01:00 -05:00, 2027-03-14 03:00 -04:00"),
            ("15 2 * * *", new_york, "2027-03-13T12:00:00Z", "2027-03-14 03:00 -04:00, 2027-03-15 02:15 -04:00"),
            ("15 1 * * *", new_york, "2027-11-06T12:00:00Z", "2027-11-07 01:15 -04:00, 2027-11-08 01:15 -05:00"),
            (
                "@hourly",
                new_york,
                "2027-11-07T04:30:00Z",
                "2027-11-07 01:00 -04:00, 2027-11-07 01:00 -05:00, 2027-11-07 02:00 -05:00",
            ),
            // By half an hour: 02:00 becomes 02:30 on 2027-10-03, and 01:30 on 2027-04-04.
            ("10 2 * * *", lord_howe, "2027-10-02T06:00:00Z", "2027-10-03 02:30 +11:00, 2027-10-04 02:10 +11:00"),
            ("45 1 * * *", lord_howe, "2027-04-03T06:00:00Z", "2027-04-04 01:45 +11:00, 2027-04-05 01:45 +10:30"),
            (
                "*/15 * * * *",
                lord_howe,
                "2027-04-03T14:35:00Z",
                "2027-04-04 01:45 +11:00, 2027-04-04 01:30 +10:30, 2027-04-04 01:45 +10:30, 2027-04-04 02:00 +10:30",
            ),
            // Midnight itself is skipped on 2027-04-30.
            ("@daily", cairo, "2027-04-29T12:00:00Z", "2027-04-30 01:00 +03:00, 2027-05-01 00:00 +03:00"),
            ("0 0 30 4 *", cairo, "2027-04-01T12:00:00Z", "2027-04-30 01:00 +03:00, 2028-04-30 00:00 +03:00"),
        ] {
            let expected: Vec<&str> = expected.split(", ").collect();
            assert_eq!(ticks(cron, zone, after, expected.len()), expected, "'{cron}' {zone} after {after}");
        }
    }

    #[test]
    fn the_calendar_has_its_corners() {
        for (cron, after, expected) in [
            ("0 0 29 2 *", "2027-12-31T00:00:00Z", "2028-02-29, 2032-02-29, 2036-02-29"),
            ("0 0 29 2 *", "2096-03-01T00:00:00Z", "2104-02-29"),
            (
                "0 0 31 * *",
                "2027-12-31T00:00:00Z",
                "2028-01-31, 2028-03-31, 2028-05-31, 2028-07-31, 2028-08-31, 2028-10-31, 2028-12-31",
            ),
            ("0 0 30 * *", "2027-12-31T00:00:00Z", "2028-01-30, 2028-03-30"),
            ("0 0 L * *", "2027-12-31T00:00:00Z", "2028-01-31, 2028-02-29, 2028-03-31"),
            ("0 0 * * 7", "2027-12-31T00:00:00Z", "2028-01-02, 2028-01-09"),
            ("0 0 * * 0", "2027-12-31T00:00:00Z", "2028-01-02, 2028-01-09"),
            ("0 0 * * sun", "2027-12-31T00:00:00Z", "2028-01-02, 2028-01-09"),
            ("0 0 * * 5-7", "2027-12-31T00:00:00Z", "2028-01-01, 2028-01-02, 2028-01-07"),
            ("0 0 * jan,DEC MON-wed", "2027-12-31T00:00:00Z", "2028-01-03, 2028-01-04, 2028-01-05, 2028-01-10"),
            // Either day will do, unless one is written with a star.
            ("0 0 13 * FRI", "2027-12-31T00:00:00Z", "2028-01-07, 2028-01-13, 2028-01-14"),
            ("0 0 */10 * MON", "2027-12-31T00:00:00Z", "2028-01-31, 2028-02-21, 2028-05-01"),
            ("0 0 ? * MON#1", "2027-12-31T00:00:00Z", "2028-01-03, 2028-02-07"),
            ("@yearly", "2027-12-31T00:00:00Z", "2028-01-01, 2029-01-01"),
            ("@Annually", "2027-12-31T00:00:00Z", "2028-01-01"),
            ("@monthly", "2027-12-31T00:00:00Z", "2028-01-01, 2028-02-01"),
            ("@weekly", "2027-12-31T00:00:00Z", "2028-01-02"),
            (" @midnight ", "2027-12-31T00:00:00Z", "2028-01-01"),
        ] {
            let days: Vec<&str> = expected.split(", ").collect();
            let found: Vec<String> =
                ticks(cron, "UTC", after, days.len()).iter().map(|tick| tick.replace(" 00:00 +00:00", "")).collect();
            assert_eq!(found, days, "'{cron}'");
        }
    }

    #[test]
    fn ticks_are_after_the_moment_and_whole_minutes() {
        let rule = Rule::parse("*/10 * * * *", "UTC").unwrap();
        for (after, expected) in [
            ("2027-01-01T00:00:00Z", "2027-01-01T00:10:00Z"),
            ("2027-01-01T00:09:59.999999Z", "2027-01-01T00:10:00Z"),
            ("2027-01-01T00:10:00.000001Z", "2027-01-01T00:20:00Z"),
        ] {
            assert_eq!(rule.after(at(after)), Some(at(expected)), "{after}");
        }
        assert_eq!(rule.after(SystemTime::UNIX_EPOCH - Duration::from_secs(60)), Some(at("1970-01-01T00:10:00Z")));
        assert_eq!(rule.after(at("9999-12-31T23:59:59Z")), None);
    }

    #[test]
    fn rules_that_are_wrong_name_the_field() {
        for (cron, expected) in [
            ("", "cron: '' has 0 fields; write five"),
            ("* * * *", "has 4 fields"),
            ("5L", "cron: '5L' has one field; write five"),
            ("0 * * * * *", "has 6 fields"),
            ("60 * * * *", "cron: minute: '60': number out of bounds; allowed are 0 to 59"),
            ("* 24 * * *", "cron: hour: '24': number out of bounds"),
            ("* 5-3 * * *", "cron: hour: '5-3': range out of bounds"),
            ("* * 0 * *", "cron: day of the month: '0': number out of bounds"),
            ("* * 32 * *", "cron: day of the month: '32'"),
            ("* * * 13 *", "cron: month: '13'"),
            ("* * * FOO *", "cron: month: 'FOO': contains illegal character"),
            ("* * * * 8", "cron: day of the week: '8'"),
            ("* * * * MONDAY", "cron: day of the week: 'MONDAY'"),
            ("1,,2 * * * *", "cron: minute: '1,,2': a list has a gap"),
            ("*/0 * * * *", "cron: minute: '*/0': step cannot be zero"),
            ("*/60 * * * *", "cron: minute: '*/60': the step is larger than the whole"),
            ("5/10 * * * *", "cron: minute: '5/10': invalid step syntax"),
            ("1-2-3 * * * *", "cron: minute: '1-2-3': invalid range"),
            ("-1 * * * *", "cron: minute: '-1'"),
            ("99999999999 * * * *", "cron: minute: '99999999999': invalid number"),
            ("x\u{0}y * * * *", "cron: minute: "),
            ("@reboot", "cron: '@reboot' is no nickname; there are @yearly"),
            ("@every 5m", "cron: '@every 5m' is no nickname"),
            ("0 0 30 2 *", "cron: '0 0 30 2 *' is never due"),
            ("0 0 31 4,6,9,11 *", "is never due"),
        ] {
            let error = Rule::parse(cron, "UTC").unwrap_err().to_string();
            assert!(error.contains(expected), "'{cron}': {error}");
        }
        // What was set by SQL is read by the sweep alone, which names as much.
        let error = Rule::stored("61 * * * *", "UTC").unwrap_err().to_string();
        assert!(error.contains("cron: minute: '61': number out of bounds; allowed are 0 to 59"), "{error}");
        let error = Rule::stored("61 * * * * *", "UTC").unwrap_err().to_string();
        assert!(error.contains("cron: '61 * * * * *': number out of bounds"), "{error}");
        for zone in ["", "Europe/Rom", "+01:00", "../etc/passwd"] {
            let error = Rule::parse("@daily", zone).unwrap_err().to_string();
            assert!(error.contains(&format!("timezone: there is no time zone '{zone}'")), "{error}");
        }
    }

    /// On the days around changes of clocks, of every rule with a star: its ticks are the minutes that match, by a plain look at each.
    #[test]
    fn stars_are_due_at_every_minute_that_matches() {
        for (zone, day) in [
            ("Europe/Berlin", "2027-10-30"),
            ("Europe/Berlin", "2027-03-27"),
            ("Australia/Lord_Howe", "2027-04-03"),
            ("Africa/Cairo", "2027-10-28"),
        ] {
            for cron in ["*/7 * * * *", "* 2 * * *", "13 */2 * * *", "*/20 0-3 * * SUN", "5,35 * * * *"] {
                let rule = Rule::parse(cron, zone).unwrap();
                let start = Timestamp::try_from(at(&format!("{day}T00:00:00Z"))).unwrap().as_second();
                let end = start + 3 * 86_400;
                let matches = |second: &i64| {
                    let local = Timestamp::from_second(*second).unwrap().to_zoned(rule.zone.clone());
                    rule.cron.is_time_matching(&local).unwrap()
                };
                let expected: Vec<i64> = (start + 60..end).step_by(60).filter(matches).collect();
                let found: Vec<i64> = std::iter::successors(rule.next(start), |tick| rule.next(*tick))
                    .take_while(|tick| *tick < end)
                    .collect();
                assert_eq!(found, expected, "'{cron}' {zone} {day}");
            }
        }
    }
}
