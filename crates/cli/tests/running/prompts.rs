//! `work` with a model: it takes the connections that it may have.

use std::process::Command;

use crate::processes::Running;
use crate::support::{Queue, answer, posthouse};

#[tokio::test]
async fn many_calls_at_once_need_no_setting_of_open_files() {
    let queue = Queue::new().await;
    let mut sim = posthouse();
    let sim = Running::start(sim.args(["sim", "--json", "--latency", "1s"]));
    let ready: serde_json::Value = serde_json::from_str(&sim.line("base_url")).unwrap();
    let job = |i| format!("{{\"kind\":\"summarize\",\"payload\":{{\"text\":\"text {i}\"}}}}\n");
    queue.run_with_stdin(&["enqueue", "--jsonl", "-"], (0..80).map(job).collect::<String>()).fine();
    let work = queue.command(&["work", "--until-empty", "--model", "sim", "--provider-url"]);
    // Fewer than the calls, as the 1,024 of many systems are fewer than a thousand calls and the rest.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -Sn 60; exec \"$0\" \"$@\""]).arg(work.get_program()).args(work.get_args());
    limited.arg(ready["base_url"].as_str().unwrap()).env_clear();
    limited.envs(work.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let said = answer(&mut limited, None).fine();
    assert!(said.stdout.contains("ended: 80 done\n"), "{said:?}");
}
