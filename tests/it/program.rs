//! The harness can start, pause, resume and kill a program, and finds the `posthouse` binary.

use std::process::Command;

use crate::harness::{Program, SOON, wait_until};

/// The state letter of a process on Linux, e.g. `T` for stopped.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.trim_start().chars().next()
}

#[tokio::test]
async fn pauses_resumes_and_ends_a_program() {
    let script = "trap 'echo asked; exit 3' TERM; echo ready; while :; do sleep 0.05; done";
    let mut program = Program::start(Command::new("sh").args(["-c", script]));
    program.printed("ready", SOON).await;
    program.pause();
    if cfg!(target_os = "linux") {
        wait_until(SOON, "the program stands still", async || state(program.pid()) == Some('T')).await;
    }
    program.terminate();
    program.resume();
    assert_eq!(program.ended(SOON).await.code(), Some(3));
    assert!(program.output().contains("asked"));
}

#[tokio::test]
async fn kills_a_program_that_would_not_end() {
    let mut program =
        Program::start(Command::new("sh").args(["-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"]));
    program.printed("ready", SOON).await;
    program.kill_9();
    assert_eq!(program.ended(SOON).await.code(), None);
}

#[tokio::test]
async fn finds_the_posthouse_binary() {
    let mut program = Program::start(Program::posthouse().arg("--help"));
    assert!(program.ended(SOON).await.success(), "{}", program.output());
}
