//! `posthouse dead`.

use std::process::ExitCode;

use crate::args::{Global, Dead};
use crate::failure::{Failure, Result};

pub(crate) async fn run(command: Dead, global: &Global) -> Result<ExitCode> {
    Err(Failure::new(format!("{command:?} {global:?}")))
}
