//! The command that was typed, once more: how it is told to go on.

use std::env::args_os;

const DATABASE: &str = "--database-url";

/// The command line of this process with these options in place of what was said of them, to be pasted into a shell. The URL of a
/// database is left out, since a password may stand in it: [`names_database`] says whether there was one.
pub(crate) fn command(options: &[(&str, &str)]) -> String {
    let typed: Vec<String> = args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    rewritten(&typed, options)
}

/// Whether the command line names the database.
pub(crate) fn names_database() -> bool {
    args_os().skip(1).any(|word| is_option(&word.to_string_lossy(), DATABASE))
}

fn is_option(word: &str, option: &str) -> bool {
    word.strip_prefix(option).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
}

fn rewritten(typed: &[String], options: &[(&str, &str)]) -> String {
    let replaced = |word: &str| {
        let mut names = options.iter().map(|(name, _)| *name).chain([DATABASE]);
        names.find(|name| is_option(word, name))
    };
    let mut command = "posthouse".to_owned();
    let mut words = typed.iter();
    while let Some(word) = words.next() {
        match replaced(word) {
            // Its value is a word of its own.
            Some(name) if name == word => drop(words.next()),
            Some(_) => {}
            None => command += &format!(" {}", quoted(word)),
        }
    }
    for (name, value) in options {
        command += &format!(" {name} {}", quoted(value));
    }
    command
}

/// A word as a shell reads it whole.
fn quoted(word: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./:@%+=,".contains(letter);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_typed_stays_and_what_changes_is_said_once() {
        let typed = ["dead", "list", "--kind", "it's $5", "--next=a/1", "--since", "2h"].into_iter();
        let typed = typed.chain(["--database-url", "postgres://u:sesame@h/d", "--limit", "2"]);
        let typed: Vec<String> = typed.map(str::to_owned).collect();
        assert_eq!(
            rewritten(&typed, &[("--since", "2027-01-31T08:00:00Z"), ("--next", "2027-01-31T08:00:00+00:00/42")]),
            r"posthouse dead list --kind 'it'\''s $5' --limit 2 --since 2027-01-31T08:00:00Z --next 2027-01-31T08:00:00+00:00/42"
        );
    }

    #[test]
    fn only_words_that_need_it_are_quoted() {
        for (word, expected) in [("a-b_1", "a-b_1"), ("", "''"), ("a b", "'a b'"), ("ü", "'ü'"), ("'", r"''\'''")] {
            assert_eq!(quoted(word), expected);
        }
    }
}
