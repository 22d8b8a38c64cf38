//! `posthouse sim` as a process: it says where it is, behaves as told, and ends when asked to.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::support::{answer, file, posthouse};

/// The status line and body of an answer to one request.
fn ask(address: &str, text: &str) -> String {
    let body = serde_json::json!({ "model": "sim", "messages": [{ "role": "user", "content": text }] }).to_string();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(
        stream,
        "POST /v1/chat/completions HTTP/1.1\r\nhost: sim\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn it_serves_as_scripted_until_it_is_told_to_end() {
    let script = file("script.toml", "[[step]]\nmatch = \"teapot\"\ndo = 418\n");
    let mut sim = posthouse();
    sim.args([
        "sim",
        "--json",
        "--fault",
        "match=busy,first=1,do=429,retry_after=1s",
        "--script",
        script.to_str().unwrap(),
    ]);
    let mut sim = sim.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(sim.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let url = serde_json::from_str::<Value>(&line).unwrap()["base_url"].as_str().unwrap().to_owned();
    let address = url.strip_prefix("http://").unwrap().strip_suffix("/v1").unwrap();
    let answers = ["busy", "busy", "teapot"].map(|text| ask(address, text));
    kill(Pid::from_raw(i32::try_from(sim.id()).unwrap()), Signal::SIGTERM).unwrap();
    assert!(sim.wait().unwrap().success());
    for (answer, status) in answers.iter().zip(["HTTP/1.1 429 ", "HTTP/1.1 200 ", "HTTP/1.1 418 "]) {
        assert!(answer.starts_with(status), "{answer}");
    }
    assert!(answers[0].to_lowercase().contains("retry-after: 1"), "{}", answers[0]);
}

#[test]
fn mistakes_are_named() {
    let run = |arguments: &[&str]| answer(posthouse().arg("sim").args(arguments), None);
    run(&["--fault", "explode"]).failed(2, &["--fault", "explode", "hang"]);
    run(&["--fault", "first=1"]).failed(2, &["missing field `do`"]);
    run(&["--rate-429", "2"]).failed(2, &["from 0 to 1"]);
    run(&["--latency", "soon"]).failed(2, &["--latency"]);
    run(&["--script", "/no/such/file"]).failed(1, &["/no/such/file"]);
    let script = file("bad.toml", "[[step]]\ndo = \"explode\"\n");
    run(&["--script", script.to_str().unwrap()]).failed(1, &["explode", "posthouse sim --help"]);
    run(&["--listen", "192.0.2.1:1"]).failed(1, &["192.0.2.1:1", "--listen"]);
    assert!(run(&["--help"]).fine().stdout.contains("FAULTS:"));
}
