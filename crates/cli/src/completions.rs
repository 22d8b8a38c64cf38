//! `posthouse completions`: what makes a shell complete commands and options, from the same definitions as the help.

use std::io::Write;
use std::process::ExitCode;

use clap::CommandFactory;

use crate::args::{Cli, Completions};
use crate::failure::Result;

/// Prints the script for a shell.
pub(crate) fn run(args: &Completions) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "posthouse", &mut script);
    std::io::stdout().lock().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}
