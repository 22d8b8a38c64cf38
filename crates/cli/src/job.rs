//! `posthouse job`.

use std::process::ExitCode;

use crate::args::{Global, Job};
use crate::failure::{Failure, Result};

pub(crate) async fn run(command: Job, global: &Global) -> Result<ExitCode> {
    Err(Failure::new(format!("{command:?} {global:?}")))
}
