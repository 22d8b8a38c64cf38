//! The ways in which the simulated provider can behave, by name.

use serde::{Deserialize, Deserializer, de::Error};
use std::fmt;
use std::str::FromStr;

macro_rules! faults {
    ($($variant:ident, $name:literal, $meaning:literal;)*) => {
        /// A way to behave. `ok` is one too, so that a script can end a series of faults.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Fault {
            $(#[doc = $meaning] $variant,)*
            /// Any status from 400 to 599, with the body that providers send with it.
            Status(u16),
        }

        impl Fault {
            /// Name and meaning of each, for help texts. A bare number from 400 to 599 is a fault as well.
            pub const ALL: &'static [(&'static str, &'static str)] = &[$(($name, $meaning),)*];
        }

        impl fmt::Display for Fault {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$variant => f.write_str($name),)*
                    Self::Status(status) => write!(f, "{status}"),
                }
            }
        }

        impl FromStr for Fault {
            type Err = String;
            fn from_str(text: &str) -> Result<Self, String> {
                if let Some(status) = text.parse().ok().filter(|status| (400..600).contains(status)) {
                    return Ok(Self::Status(status));
                }
                match text {
                    $($name => Ok(Self::$variant),)*
                    _ => {
                        let names: Vec<&str> = Self::ALL.iter().map(|(name, _)| *name).collect();
                        Err(format!("no fault {text:?}; use a status from 400 to 599, or one of: {}", names.join(", ")))
                    }
                }
            }
        }
    };
}

faults! {
    Ok, "ok", "A proper answer.";
    Say, "say", "A proper answer with the step's own `text`.";
    NoStream, "no_stream", "A proper answer in one JSON body, although a stream was asked for.";
    NoUsage, "no_usage", "A proper answer without usage.";
    NoEnd, "no_end", "A proper answer with a finish reason, after which the connection just stays open.";
    Bytewise, "bytewise", "A proper answer in pieces of one byte.";
    ToolCall, "tool_call", "A tool call in pieces, instead of text.";
    InsufficientQuota, "insufficient_quota", "429 that says that the account is empty.";
    ContextLength, "context_length", "400 that says that the input is too long.";
    ModelNotFound, "model_not_found", "404 that says that there is no such model.";
    Filter, "content_filter", "An answer that the content filter stopped.";
    Length, "length", "An answer that the token limit cut, after `after_tokens`.";
    Hang, "hang", "Nothing at all, not even headers.";
    HangMid, "hang_mid", "Some tokens, then nothing on an open connection.";
    Drip, "drip", "Keep-alive comments for ever, no content.";
    Cut, "cut", "Some tokens, then an orderly end without a finish reason.";
    CutUtf8, "cut_utf8", "Some tokens, then a broken connection in the middle of a character.";
    CutToolCall, "cut_tool_call", "An orderly end in the middle of a tool call.";
    StreamError, "stream_error", "Some tokens, then an error event that says overloaded.";
    Error200, "error_200", "An error body under status 200.";
    Garbage, "garbage", "A stream of something that is not JSON.";
    NoChoices, "no_choices", "A proper body with an empty list of choices.";
    Html200, "html_200", "An HTML page under status 200.";
    Html502, "html_502", "A large HTML page under status 502.";
    Empty, "empty", "An empty body under status 200.";
    Empty400, "empty_400", "An empty body under status 400.";
    Gzip, "gzip", "Bytes that claim to be gzip and are not.";
    ContentLength, "content_length", "A body shorter than its Content-Length.";
    Redirect, "redirect", "A redirect to another path.";
    Reset, "reset", "A connection reset instead of an answer.";
    ResetMid, "reset_mid", "Some tokens, then a connection reset.";
    Huge, "huge", "An answer without an end.";
    HugeLine, "huge_line", "An event without an end.";
    Echo, "echo", "400 that repeats the whole request, its Authorization header included.";
    Nul, "nul", "An answer with NUL characters in it.";
    Surrogate, "surrogate", "An answer with a lone surrogate in it.";
}

impl<'de> Deserialize<'de> for Fault {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum NameOrStatus {
            Name(String),
            Status(u16),
        }
        let text = match NameOrStatus::deserialize(deserializer)? {
            NameOrStatus::Name(name) => name,
            NameOrStatus::Status(status) => status.to_string(),
        };
        text.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_name_reads_back() {
        for (name, _) in Fault::ALL {
            assert_eq!(name.parse::<Fault>().unwrap().to_string(), *name);
        }
        assert_eq!("529".parse(), Ok(Fault::Status(529)));
        assert!("200".parse::<Fault>().unwrap_err().contains("html_200"));
    }
}
