//! What can be typed: every command and option, defined once. Help texts and shell completions are made from here.

mod alert;
mod bench;
mod choice;
mod db;
mod dead;
mod depth;
mod enqueue;
mod gate;
mod job;
mod queue;
mod run;
mod schedule;
mod sim;
mod tenant;
mod time;
mod usage;

use std::error::Error as _;
use std::net::AddrParseError;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};

use clap::error::{ContextKind, ContextValue};
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

pub(crate) use alert::{Alert, AlertList, AlertSet, Switch};
pub(crate) use bench::Bench;
pub(crate) use choice::{CreatedChoice, DeadChoice, DeadConditions, ErrorChoice, Filter, JobChoice, Moment, Scope};
pub(crate) use db::{Db, DbAdopt, DbDoctor, DbIsolate, DbMigrate};
pub(crate) use dead::{Assignment, Changes, Dead, DeadList, Purge, Redrive};
pub(crate) use depth::Depth;
pub(crate) use enqueue::Enqueue;
pub(crate) use gate::{Closing, Exact, Gate, GateApply, GateSet, Limit};
pub(crate) use job::{Job, JobList, JobPurge, JobWait, Page};
pub(crate) use queue::{FairBy, Queue, QueueSet};
pub(crate) use run::{Demo, Dev, ExecKind, STOP_AT_EOF, Work};
pub(crate) use schedule::{Schedule, ScheduleApply, ScheduleSet};
pub(crate) use sim::Sim;
pub(crate) use tenant::{Tenant, TenantSet};
pub(crate) use usage::{By, Day, Usage};

/// A Postgres job queue that LLM agents can depend on.
#[derive(Debug, Parser)]
#[command(name = "posthouse", version, about, long_about = LONG, after_long_help = EXAMPLES, max_term_width = 120)]
#[command(arg_required_else_help = true, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Reads what was typed. What cannot be read ends the process: exit code 2, or 0 for help and version.
    pub(crate) fn read() -> Self {
        Self::try_parse().unwrap_or_else(|error| match in_words(&error) {
            Some(text) => {
                // If stderr is closed too, the exit code is all there is left to say.
                let _ = std::io::Write::write_all(&mut anstream::stderr().lock(), text.as_bytes());
                std::process::exit(2)
            }
            None => error.exit(),
        })
    }
}

/// The error about a number or an address that is none, in words that say what is expected.
fn in_words(error: &clap::Error) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.as_str(),
        _ => "",
    };
    let source = error.source()?;
    let words = if let Some(no_number) = source.downcast_ref::<ParseIntError>() {
        match no_number.kind() {
            IntErrorKind::PosOverflow | IntErrorKind::NegOverflow => "no number may be so large",
            _ if text(ContextKind::InvalidValue).starts_with('-') => "it must be a whole number from 0 on",
            _ if text(ContextKind::InvalidArg).contains("ID") => {
                "the id of a job is a whole number, such as 42; `posthouse job list` shows them"
            }
            _ => "it must be a whole number, such as 42",
        }
    } else if source.is::<ParseFloatError>() {
        "it must be a number, such as 1.5"
    } else if source.is::<AddrParseError>() {
        "write ADDRESS:PORT, as in 127.0.0.1:4010"
    } else {
        return None;
    };
    Some(error.render().ansi().to_string().replace(&source.to_string(), words))
}

const LONG: &str = "A Postgres job queue that LLM agents can depend on.

Jobs are rows in a Postgres database, put there by SQL, by a program or by `posthouse enqueue`; workers claim them under a lease \
and run them. Whatever happens to a worker, each job reaches its end.

Exit codes: 0 fine, 1 failed, 2 wrong arguments.";

const EXAMPLES: &str = "EXAMPLES:
  posthouse demo                              see it at work, nothing needed
  posthouse dev                               Postgres and a provider to try
  posthouse db migrate                        make the schema in DATABASE_URL
  posthouse enqueue summarize '{\"text\":\"…\"}'  put a job in
  posthouse work --config posthouse.toml      run jobs
  posthouse status                            how it is going";

/// Options of every command.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// The database, as postgres://user:password@host:5432/database
    #[arg(long, global = true, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    pub(crate) database_url: Option<String>,

    /// Print JSON for programs instead of text for people
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Log what happens, on stderr; twice for more. POSTHOUSE_LOG=FILTER chooses exactly
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,

    /// How log lines look, and those of `work`. Default: auto, which is text on a terminal, JSON otherwise
    #[arg(
        long,
        global = true,
        env = "POSTHOUSE_LOG_FORMAT",
        value_enum,
        default_value_t,
        hide_default_value = true,
        hide_possible_values = true,
        value_name = "auto|text|json"
    )]
    pub(crate) log_format: LogFormat,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    #[default]
    Auto,
    Text,
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Demo(Demo),
    Dev(Dev),
    /// Make, check and find the database schema
    #[command(after_long_help = db::EXAMPLES, long_about = db::LONG)]
    Db {
        #[command(subcommand)]
        command: Db,
    },
    Enqueue(Box<Enqueue>),
    Work(Box<Work>),
    Status(Status),
    Usage(Usage),
    /// Look at jobs and manage them
    #[command(after_long_help = job::EXAMPLES, long_about = job::LONG)]
    Job {
        #[command(subcommand)]
        command: Job,
    },
    /// Look at dead letters (failed jobs), and redrive or purge them
    #[command(after_long_help = dead::EXAMPLES, long_about = dead::LONG)]
    Dead {
        #[command(subcommand)]
        command: Dead,
    },
    /// Look at the settings of queues, change them, pause and resume
    #[command(after_long_help = queue::EXAMPLES, long_about = queue::LONG)]
    Queue {
        #[command(subcommand)]
        command: Queue,
    },
    /// Look at tenants, weigh them, pause and resume
    #[command(after_long_help = tenant::EXAMPLES, long_about = tenant::LONG)]
    Tenant {
        #[command(subcommand)]
        command: Tenant,
    },
    /// Set limits that jobs pass before they run, close and open them
    #[command(after_long_help = gate::EXAMPLES, long_about = gate::LONG)]
    Gate {
        #[command(subcommand)]
        command: Gate,
    },
    /// Set cron rules that enqueue jobs, look at them, let them rest
    #[command(after_long_help = schedule::EXAMPLES, long_about = schedule::LONG)]
    Schedule {
        #[command(subcommand)]
        command: Schedule,
    },
    /// Look at alerts, set when they are raised, and try them
    #[command(after_long_help = alert::EXAMPLES, long_about = alert::LONG)]
    Alert {
        #[command(subcommand)]
        command: Alert,
    },
    Sim(Sim),
    Bench(Bench),
    Completions(Completions),
}

/// Show queues, workers and failures at a glance
///
/// For each queue and tenant: jobs that are due, later, running, waiting, done (ever) and failed (dead letters there are now),
/// and for how long the oldest due job has been due; before that, whether the database is a copy that nobody has adopted. Then gates that are closed or full (a limit a minute: used to nine tenths), open
/// alerts, the live workers, the kinds that nobody serves, and the newest failures.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse status
  posthouse status --watch                    again every 2 seconds
  posthouse status --json | jq '.queues[].oldest_due_age_ms'")]
pub(crate) struct Status {
    /// Show it again and again, every so many seconds
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = time::seconds)]
    pub(crate) watch: Option<std::time::Duration>,
}

/// Print completions for a shell
///
/// Prints a script that makes your shell complete commands and options.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse completions bash > /etc/bash_completion.d/posthouse
  posthouse completions zsh > ~/.zfunc/_posthouse          with ~/.zfunc in fpath
  posthouse completions fish > ~/.config/fish/completions/posthouse.fish")]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::{CommandFactory, error::ErrorKind};

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split(' '))
    }

    #[test]
    fn the_definitions_are_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_help_and_examples() {
        fn walk(command: &clap::Command, path: &str) {
            let path = format!("{path} {}", command.get_name());
            let about = command.get_about().unwrap_or_else(|| panic!("{path}: no about")).to_string();
            assert!(about.len() < 80 && !about.contains('\n') && !about.ends_with('.'), "{path}: {about}");
            let group = command.has_subcommands();
            let examples = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
            assert!(examples.contains("EXAMPLES:"), "{path}: no examples");
            assert!(group || command.get_long_about().is_some(), "{path}: no longer text");
            for sub in command.get_subcommands() {
                walk(sub, &path);
            }
        }
        for command in Cli::command().get_subcommands() {
            walk(command, "posthouse");
        }
    }

    #[test]
    fn options_that_exclude_each_other_are_refused() {
        for line in [
            "posthouse enqueue k {} --delay 1s --run-at tomorrow",
            "posthouse enqueue k --jsonl f",
            "posthouse enqueue --dedupe-for 1h k",
            "posthouse enqueue --skip 3 k",
            "posthouse work --listen-url postgres://h/d --no-listen",
            "posthouse dead redrive 1 --all",
            "posthouse dead redrive 1 --payload {} --set a=1",
            "posthouse job cancel 1 --all",
        ] {
            let kind = parse(line).map(|_| ()).expect_err(line).kind();
            let expected = [ErrorKind::ArgumentConflict, ErrorKind::MissingRequiredArgument];
            assert!(expected.contains(&kind), "{line}: {kind:?}");
        }
    }

    #[test]
    fn what_is_no_number_is_told_what_it_should_be() {
        for (line, words) in [
            ("posthouse job show one", &["<ID>", "the id of a job is a whole number, such as 42"][..]),
            ("posthouse dead redrive 1 2.5", &["[ID]", "2.5", "the id of a job"]),
            ("posthouse job show 99999999999999999999", &["<ID>", "so large"]),
            ("posthouse job list --limit many", &["--limit <N>", "many", "a whole number, such as 42"]),
            ("posthouse tenant set t --weight abc", &["--weight <N>", "abc", "a number, such as 1.5"]),
            ("posthouse sim --listen here", &["--listen <ADDRESS>", "here", "ADDRESS:PORT"]),
            ("posthouse enqueue k --jsonl f --skip=-1", &["--skip <", "a whole number from 0 on"]),
        ] {
            let error = parse(line).unwrap_err();
            let text = in_words(&error).unwrap_or_else(|| panic!("{line}: {error}"));
            for word in words {
                assert!(text.contains(word), "{line}: no {word:?} in {text}");
            }
            assert!(!text.contains("invalid digit"), "{text}");
        }
        assert!(in_words(&parse("posthouse job list --state dead").unwrap_err()).is_none());
    }

    #[test]
    fn options_of_all_commands_may_come_last() {
        let cli = parse("posthouse job list --state failed --json --database-url postgres://h/d").unwrap();
        assert!(cli.global.json);
        assert_eq!(cli.global.database_url.as_deref(), Some("postgres://h/d"));
    }

    #[test]
    fn durations_say_how_to_write_them() {
        let error = parse("posthouse enqueue k {} --delay soon").unwrap_err().to_string();
        assert!(error.contains("--delay") && error.contains("like 30s, 5m"), "{error}");
        assert_eq!(time::duration("1m 30s"), Ok(std::time::Duration::from_secs(90)));
    }
}
