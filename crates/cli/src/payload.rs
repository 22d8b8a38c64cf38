//! The payload of `posthouse enqueue`: JSON text on the command line, in a file, or on standard input.

use std::io::Read;

use posthouse::NewJob;
use serde_json::value::RawValue;

use crate::failure::{Failure, Result};

/// A job of this kind with the payload that was typed. The JSON text goes on as it is: no number is read and written again.
pub(crate) fn job(kind: &str, payload: Option<&str>) -> Result<NewJob> {
    let (name, text) = typed("PAYLOAD", payload.unwrap_or("{}"))?;
    NewJob::from_json(kind, text).map_err(|error| {
        let why = error.to_string();
        let why = why.strip_prefix("payload: ").unwrap_or(&why);
        Failure::usage(format!("{name}: {why}")).hint(format!(
            "the payload is JSON; quote it for your shell, as in\n  posthouse enqueue {kind} '{{\"text\":\"it works\"}}'\n\
             a plain text is '\"in double quotes\"'; a file is @FILE, standard input is -"
        ))
    })
}

/// JSON text that was typed for an option, named by it in complaints.
pub(crate) fn json(option: &str, argument: &str) -> Result<Box<RawValue>> {
    let (name, text) = typed(option, argument)?;
    RawValue::from_string(text).map_err(|error| {
        Failure::usage(format!("{name}: not valid JSON: {error}")).hint(format!(
            "a plain text is '\"in double quotes\"'; a file is {option} @FILE, standard input is {option} -"
        ))
    })
}

/// Where the text comes from, and the text: the argument itself, a file, or standard input.
fn typed(option: &str, argument: &str) -> Result<(String, String)> {
    if argument == "-" {
        return Ok(("standard input".to_owned(), text(&read(std::io::stdin().lock(), "standard input")?)?));
    }
    match argument.strip_prefix('@') {
        None => Ok((option.to_owned(), argument.to_owned())),
        Some("") => Err(Failure::usage(format!("{option} @: the name of a file is missing after the @"))),
        Some(path) => {
            let file = std::fs::File::open(path)
                .map_err(|error| Failure::new(format!("cannot read {path}, named by {option} @{path}: {error}")))?;
            Ok((path.to_owned(), text(&read(file, path)?)?))
        }
    }
}

fn read(mut from: impl Read, name: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).map_err(|error| Failure::new(format!("cannot read {name}: {error}")))?;
    Ok(bytes)
}

/// UTF-8, with or without the mark that some editors put before it.
fn text(bytes: &[u8]) -> Result<String> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    String::from_utf8(bytes.to_vec()).map_err(|error| {
        Failure::usage(format!("the payload is not UTF-8: {}", error.utf8_error()))
            .hint("convert it first, as with `iconv -f latin1 -t utf-8 FILE`")
    })
}
