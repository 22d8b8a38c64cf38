//! With real processes: what becomes of their output and exit, and that nothing of them is left.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use super::*;

const NONE: &[(&str, String)] = &[];

async fn ran(command: &str, input: &str) -> Outcome {
    timeout(Duration::from_secs(60), run(command, input, NONE, std::future::pending())).await.unwrap()
}

async fn done(command: &str, input: &str) -> String {
    match ran(command, input).await {
        Outcome::Done(result) => result.get().to_owned(),
        other => panic!("{command}: {other:?}"),
    }
}

async fn retried(command: &str) -> JobError {
    match ran(command, "{}").await {
        Outcome::Retry { error, delay: None } => error,
        other => panic!("{command}: {other:?}"),
    }
}

/// A folder in which programs note their process ids.
struct Notes(PathBuf);

impl Notes {
    fn new() -> Self {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("posthouse-exec-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    /// The process id in a file, as soon as it is there.
    async fn pid(&self, name: &str) -> i32 {
        let file = self.0.join(name);
        eventually(|| read_pid(&file).is_some()).await;
        read_pid(&file).unwrap()
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

fn read_pid(file: &Path) -> Option<i32> {
    std::fs::read_to_string(file).ok()?.strip_suffix('\n')?.parse().ok()
}

async fn eventually(mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "it did not come to pass");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Whether a process runs; one that has ended and was not collected (a zombie) does not.
fn runs(pid: i32) -> bool {
    let state = std::process::Command::new("ps").args(["-o", "stat=", "-p", &pid.to_string()]).output().unwrap();
    let state = String::from_utf8_lossy(&state.stdout).trim().to_owned();
    !state.is_empty() && !state.starts_with('Z')
}

#[tokio::test]
async fn payload_in_json_out() {
    assert_eq!(done("cat", r#"{"text": "hé\u0000"}"#).await, r#"{"text": "hé\u0000"}"#);
    assert_eq!(done("echo working; echo '{\"sum\": 7}'", "{}").await, r#"{"sum": 7}"#);
    assert_eq!(done("printf 'plain text\\n'", "{}").await, r#""plain text""#);
    assert_eq!(done("true", "{}").await, "null");
    assert_eq!(done("printf 'a\\377b'", "{}").await, "\"a\u{fffd}b\"");
}

#[tokio::test]
async fn the_job_is_in_the_environment() {
    let environment = [("POSTHOUSE_JOB_ID", "17".to_owned()), ("POSTHOUSE_TENANT", "a\0b".to_owned())];
    let ended = run("echo \"$POSTHOUSE_JOB_ID $POSTHOUSE_TENANT\"", "{}", &environment, std::future::pending()).await;
    assert!(matches!(ended, Outcome::Done(result) if result.get() == "\"17 a\u{fffd}b\""));
}

#[tokio::test]
async fn exit_codes_decide() {
    let error = retried("echo one >&2; echo two >&2; exit 3").await;
    assert_eq!((&*error.class, &*error.message), ("exit", "exit status 3: one\ntwo"));
    assert_eq!(error.detail["exit_code"], 3);
    assert_eq!(retried("echo said on stdout; exit 1").await.message, "exit status 1: said on stdout");
    assert_eq!(retried("exit 1").await.message, "exit status 1");
    for code in [64, 65] {
        let Outcome::Fail(error) = ran(&format!("echo bad input >&2; exit {code}"), "{}").await else { panic!() };
        assert_eq!(error.message, format!("exit status {code}: bad input"));
    }
    let error = retried("kill -KILL $$").await;
    assert_eq!((&*error.class, &*error.message), ("signal", "killed by SIGKILL"));
    assert!(retried("sh -c 'kill -SEGV $$'; exit $?").await.message.contains("SIGSEGV"));
}

#[tokio::test]
async fn not_now_says_how_long() {
    let snoozed = |outcome| match outcome {
        Outcome::Snooze { delay, reason, .. } => (delay.as_millis(), reason),
        other => panic!("{other:?}"),
    };
    let busy = r#"echo busy >&2; echo '{"delay_ms": 1500}' >&2; exit 75"#;
    assert_eq!(snoozed(ran(busy, "{}").await), (1_500, "busy".to_owned()));
    let told = r#"echo '{"delay_ms": 10, "reason": "night"}'; exit 75"#;
    assert_eq!(snoozed(ran(told, "{}").await), (10, "night".to_owned()));
    assert_eq!(snoozed(ran("exit 75", "{}").await), (30_000, "exit status 75: not now".to_owned()));
}

#[tokio::test]
async fn an_unknown_command_says_so() {
    let error = retried("no-such-program-here").await;
    assert!(
        error.message.starts_with("exit status 127: ") && error.message.contains("no-such-program-here"),
        "{error}"
    );
}

#[tokio::test]
async fn keys_in_errors_are_redacted() {
    let error = retried("echo 'Authorization: Bearer abcdefghijkl' >&2; exit 1").await;
    assert!(!error.message.contains("abcdefghijkl") && error.message.contains("[redacted]"), "{error}");
}

#[tokio::test]
async fn fifty_megabytes_are_drained_and_their_end_is_read() {
    let flood = "head -c 52428800 /dev/zero | tr '\\0' 'x'; echo; echo '{\"end\": true}'";
    assert_eq!(done(flood, "{}").await, r#"{"end": true}"#);
    let error = retried("head -c 5242880 /dev/zero | tr '\\0' 'x' >&2; echo >&2; echo the end >&2; exit 1").await;
    assert!(error.message.ends_with("the end") && error.message.len() < 5_000);
}

#[tokio::test]
async fn an_input_that_nobody_reads_is_fine() {
    let large = format!("\"{}\"", "x".repeat(4 << 20));
    assert_eq!(done("exec 0<&-; echo 1", &large).await, "1");
    assert_eq!(done("head -c 3 >/dev/null; echo 2", &large).await, "2");
}

#[tokio::test]
async fn what_is_left_behind_does_not_hang_the_attempt_and_ends_with_it() {
    let notes = Notes::new();
    let started = Instant::now();
    let command = format!("sleep 600 & echo $! > {}; echo 7", notes.path("left"));
    assert_eq!(done(&command, "{}").await, "7");
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    let left = notes.pid("left").await;
    eventually(|| !runs(left)).await;
}

#[tokio::test]
async fn a_dropped_attempt_ends_the_whole_group() {
    let notes = Notes::new();
    // The first grandchild ends at SIGTERM, the second has to be killed.
    let command = format!(
        "sleep 600 & echo $! > {}; (trap '' TERM; sh -c 'echo $$ > {}; sleep 600; sleep 600') & wait",
        notes.path("tame"),
        notes.path("stubborn")
    );
    let attempt = tokio::spawn(async move { run(&command, "{}", NONE, std::future::pending()).await });
    let (tame, stubborn) = (notes.pid("tame").await, notes.pid("stubborn").await);
    assert!(runs(tame) && runs(stubborn));
    attempt.abort();
    assert!(attempt.await.unwrap_err().is_cancelled());
    eventually(|| !runs(tame)).await;
    wait_for_endings();
    eventually(|| !runs(stubborn)).await;
}

#[tokio::test]
async fn a_timeout_ends_the_whole_group() {
    let notes = Notes::new();
    let command = format!("sleep 600 & echo $! > {}; echo $$ > {}; wait", notes.path("child"), notes.path("shell"));
    let attempt = run(&command, "{}", NONE, std::future::pending());
    assert!(timeout(Duration::from_millis(700), attempt).await.is_err());
    for name in ["child", "shell"] {
        let pid = notes.pid(name).await;
        eventually(|| !runs(pid)).await;
    }
}

#[tokio::test]
async fn a_cancelled_job_ends_the_group_and_is_cancelled() {
    let notes = Notes::new();
    let command = format!("echo $$ > {}; exec sleep 600", notes.path("program"));
    let cancelled = async {
        notes.pid("program").await;
    };
    assert!(matches!(run(&command, "{}", NONE, cancelled).await, Outcome::Cancelled));
    let pid = notes.pid("program").await;
    eventually(|| !runs(pid)).await;
}
