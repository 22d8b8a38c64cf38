//! What commands print: text for people on stdout, with tables that fit where it is a terminal; or JSON.

use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::time::{Duration, SystemTime};

use comfy_table::{Attribute, Cell, CellAlignment, Color, ColumnConstraint, ContentArrangement, Row, Table};
use serde::Serialize;

use crate::again;
use crate::failure::Result;
use crate::pretty;
use crate::style::{clean, clean_lines};

/// A line on stdout.
pub(crate) fn line(text: impl Display) -> Result<()> {
    Ok(writeln!(anstream::stdout().lock(), "{text}")?)
}

/// A line on stderr, for what is not the answer. Nobody may be listening there.
pub(crate) fn note(text: impl Display) {
    let _ = writeln!(anstream::stderr().lock(), "{text}");
}

/// How to see the page after a full one: this command with these options.
pub(crate) fn next_page(options: &[(&str, &str)]) {
    let with = if again::names_database() { " (with --database-url as before)" } else { "" };
    note(format_args!("older ones{with}: {}", again::command(options)));
}

/// The answer as JSON: indented for people on a terminal, on one line for programs.
pub(crate) fn json(value: &impl Serialize) -> Result<()> {
    if std::io::stdout().is_terminal() {
        return line(clean_lines(&pretty::indent(&serde_json::to_string(value)?)));
    }
    json_line(value)
}

/// One JSON value on a line of its own, whatever stdout is.
pub(crate) fn json_line(value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_vec(value)?;
    text.push(b'\n');
    Ok(std::io::stdout().lock().write_all(&text)?)
}

/// A duration in its largest unit, rounded down: `350ms`, `42s`, `3m`, `5h`, `12d`.
pub(crate) fn short(duration: Duration) -> String {
    match duration.as_secs() {
        0 => format!("{}ms", duration.as_millis()),
        s @ 1..60 => format!("{s}s"),
        s @ 60..3_600 => format!("{}m", s / 60),
        s @ 3_600..86_400 => format!("{}h", s / 3_600),
        s => format!("{}d", s / 86_400),
    }
}

/// How long ago a time of the database was, by the database's clock `now`; `in 3m` if it is still to come. What cannot be read
/// is shown as it is.
pub(crate) fn age(time: &str, now: SystemTime) -> String {
    let Some(then) = parse_time(time) else { return clean(time) };
    // Parts of a second say nothing about an age.
    let seconds = |duration: Duration| short(duration.max(Duration::from_secs(1)));
    match now.duration_since(then) {
        Ok(ago) => seconds(ago),
        Err(ahead) => format!("in {}", seconds(ahead.duration())),
    }
}

/// An age in a sentence.
pub(crate) fn when(age: &str) -> String {
    if age.starts_with("in ") { age.to_owned() } else { format!("{age} ago") }
}

/// A time as Postgres writes it in JSON: `2026-01-31T08:00:00.123456+01:00`.
pub(crate) fn parse_time(text: &str) -> Option<SystemTime> {
    let (local, zone) = text.split_at_checked(text.len().checked_sub(6)?)?;
    let (sign, zone) = zone.split_at_checked(1)?;
    let (hours, minutes) = zone.split_once(':')?;
    let offset = Duration::from_secs(hours.parse::<u64>().ok()? * 3_600 + minutes.parse::<u64>().ok()? * 60);
    let local = humantime::parse_rfc3339(&format!("{local}Z")).ok()?;
    match sign {
        "+" => local.checked_sub(offset),
        "-" => local.checked_add(offset),
        _ => None,
    }
}

/// A table that fits the terminal; elsewhere every row is one whole line.
pub(crate) struct Grid {
    table: Table,
    terminal: bool,
}

impl Grid {
    pub(crate) fn new(header: &[&str]) -> Self {
        let terminal = std::io::stdout().is_terminal();
        let mut table = Table::new();
        table.load_style(comfy_table::presets::NOTHING);
        let arrangement = if terminal { ContentArrangement::Dynamic } else { ContentArrangement::Disabled };
        table.set_content_arrangement(arrangement);
        let header = header.iter().map(|name| Cell::new(name.to_uppercase()).add_attribute(Attribute::Dim));
        table.set_header(header);
        Self { table, terminal }
    }

    /// Numbers: they stand below each other and, unlike names, are never cut, since a part of a number is another number.
    pub(crate) fn right(mut self, columns: &[usize]) -> Self {
        for column in columns {
            if let Some(column) = self.table.column_mut(*column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        self.whole(columns)
    }

    /// What is never cut either.
    pub(crate) fn whole(mut self, columns: &[usize]) -> Self {
        for column in columns {
            if let Some(column) = self.table.column_mut(*column) {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
        }
        self
    }

    pub(crate) fn row(&mut self, cells: Vec<Cell>) {
        let mut row = Row::from(cells);
        if self.terminal {
            row.max_height(1);
        }
        self.table.add_row(row);
    }

    pub(crate) fn print(self) -> Result<()> {
        for text in self.lines() {
            line(text.trim_end())?;
        }
        Ok(())
    }

    fn lines(mut self) -> Vec<String> {
        // No margin at either side: the columns begin where other lines do.
        let last = self.table.column_count().saturating_sub(1);
        for (i, column) in self.table.column_iter_mut().enumerate() {
            column.set_padding((0, if i == last { 0 } else { 2 }));
        }
        self.table.lines().collect()
    }
}

/// A cell with text of somebody else.
pub(crate) fn cell(text: impl AsRef<str>) -> Cell {
    Cell::new(clean(text.as_ref()))
}

/// A cell with the state of a job, in its colour.
pub(crate) fn state(state: &str) -> Cell {
    let cell = cell(state);
    match state {
        "done" => cell.fg(Color::Green),
        "failed" => cell.fg(Color::Red),
        "running" => cell.fg(Color::Cyan),
        "cancelled" => cell.fg(Color::Yellow),
        _ => cell,
    }
}

/// A number, dimmed where it is nothing.
pub(crate) fn count(number: i64) -> Cell {
    let cell = Cell::new(number);
    if number == 0 { cell.add_attribute(Attribute::Dim) } else { cell }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_narrow_terminal_cuts_names_and_no_numbers() {
        let mut grid = Grid::new(&["queue", "tenant", "due", "running"]).right(&[2, 3]);
        grid.terminal = true;
        grid.table.set_content_arrangement(ContentArrangement::Dynamic).set_width(30);
        grid.row(vec![cell("a long name of a queue"), cell("and of a tenant"), count(1_234_567), count(89)]);
        let lines = grid.lines();
        assert!(lines.iter().any(|line| line.contains("1234567") && line.ends_with("89")), "{lines:?}");
        assert!(lines.iter().all(|line| line.chars().count() <= 30), "{lines:?}");
    }

    #[test]
    fn a_narrow_terminal_cuts_no_name_that_is_to_stay_whole() {
        let mut grid = Grid::new(&["gate", "closed"]).whole(&[0]);
        grid.terminal = true;
        grid.table.set_content_arrangement(ContentArrangement::Dynamic).set_width(30);
        grid.row(vec![cell("endpoint:azure/gpt-4o-mini"), cell("until somebody opens it")]);
        let lines = grid.lines();
        assert!(lines.iter().any(|line| line.contains("endpoint:azure/gpt-4o-mini")), "{lines:?}");
    }

    #[test]
    fn times_of_any_zone_become_ages() {
        let now = humantime::parse_rfc3339("2026-01-31T08:00:00Z").unwrap();
        for (time, expected) in [
            ("2026-01-31T08:00:00+00:00", "1s"),
            ("2026-01-31T08:56:30.5+01:00", "3m"),
            ("2026-01-31T01:00:00-05:00", "2h"),
            ("2026-01-31T13:30:42+05:30", "in 42s"),
            ("2025-12-31T08:00:00+00:00", "31d"),
            ("infinity", "infinity"),
            ("", ""),
        ] {
            assert_eq!(age(time, now), expected, "{time}");
        }
    }
}
