//! What TOML has to say about a file, in the words of the file, and without showing what it holds: it may be a key.

/// Where it is: line and key.
pub(super) fn place(error: &toml::de::Error, text: &str) -> String {
    match error.span() {
        Some(span) => {
            let before = text.get(..span.start).unwrap_or(text);
            let line = before.matches('\n').count() + 1;
            match key_at(text, before) {
                Some(key) => format!("line {line}, {key}"),
                None => format!("line {line}"),
            }
        }
        None => "the file".to_owned(),
    }
}

/// The key whose value begins after `before`, or that begins there itself. Of the line nothing else is shown.
fn key_at<'a>(text: &'a str, before: &'a str) -> Option<&'a str> {
    let is_key =
        |key: &&str| !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    let so_far = before[line_start..].trim_end();
    let key = match so_far.strip_suffix('=') {
        Some(left) => left.rsplit([',', '{']).next(),
        // In the middle of a value there is no key to be seen, but there may be a secret.
        None if !so_far.is_empty() && !so_far.ends_with([',', '{']) => None,
        None => text[before.len()..].split_once('=').map(|(key, _)| key),
    };
    key.map(str::trim).filter(is_key)
}

/// What TOML says, in the words of the file instead of those of the program.
pub(super) fn problem(error: &toml::de::Error) -> String {
    let mut problem = error.message().to_owned();
    for (ours, theirs) in [
        ("expected u64", "expected a whole number from 0 up"),
        ("expected u32", "expected a whole number from 0 up"),
        ("expected f64", "expected a number"),
        ("expected struct Timeouts", "expected a table"),
        ("expected struct Endpoint", "expected a table { provider = \"NAME\", model = \"NAME\" }"),
        ("expected struct Provider", "expected a table"),
        ("expected struct Model", "expected a table"),
        ("expected struct Kind", "expected a table"),
    ] {
        problem = problem.replace(ours, theirs);
    }
    if problem.starts_with("unknown field `chat`") {
        problem.push_str("; the kind with the dot in its name is written [kinds.\"llm.chat\"]");
    }
    problem
}
