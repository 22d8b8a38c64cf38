//! How text looks on a terminal: in which colours, and without harm. What comes out of the database is somebody else's text and
//! is never sent to a terminal as it is.

use anstyle::{AnsiColor, Style};

pub(crate) const GOOD: Style = AnsiColor::Green.on_default();
pub(crate) const BAD: Style = AnsiColor::Red.on_default().bold();
pub(crate) const HINT: Style = AnsiColor::Cyan.on_default();
pub(crate) const DIM: Style = Style::new().dimmed();
pub(crate) const BOLD: Style = Style::new().bold();

/// Characters that would move the cursor, recolour or turn around what a terminal shows.
fn is_unsafe(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Text of somebody else, on one line, safe for a terminal.
pub(crate) fn clean(text: &str) -> String {
    clean_with(text, |c| matches!(c, '\n' | '\r' | '\t').then_some(' '))
}

/// Text of somebody else, its lines kept, safe for a terminal.
pub(crate) fn clean_lines(text: &str) -> String {
    clean_with(text, |c| matches!(c, '\n' | '\t').then_some(c))
}

fn clean_with(text: &str, instead: impl Fn(char) -> Option<char>) -> String {
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        match instead(c) {
            Some(other) => clean.push(other),
            None if is_unsafe(c) => clean.extend(c.escape_unicode()),
            None => clean.push(c),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_stored_can_steer_a_terminal() {
        assert_eq!(clean("a\u{1b}[31mb\nc\u{9b}2J\u{202e}d"), "a\\u{1b}[31mb c\\u{9b}2J\\u{202e}d");
        assert_eq!(clean_lines("é\n\tx\r"), "é\n\tx\\u{d}");
    }
}
