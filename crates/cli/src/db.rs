//! `posthouse db`.

use std::process::ExitCode;

use crate::args::{Global, Db};
use crate::failure::{Failure, Result};

pub(crate) async fn run(command: Db, global: &Global) -> Result<ExitCode> {
    Err(Failure::new(format!("{command:?} {global:?}")))
}
