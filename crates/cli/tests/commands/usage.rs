//! Tokens and money as people and programs see them.

use std::process::Command;

use posthouse_llm::sim::{Script, Sim};
use serde_json::json;

use crate::support::{Queue, answer};

const GUIDE: &str = include_str!("../../../../docs/usage.md");

/// A queue with usage of two tenants, two models and two days.
async fn used() -> Queue {
    let queue = Queue::new().await;
    queue
        .sql(
            "insert into posthouse.usage_day values
               ('2026-01-30', 'acme', 'default', 'summarize', 'gpt-4o-mini', 3, 3, 1200, 300, 200, 0.123456789, 0),
               ('2026-01-31', 'acme', 'default', 'summarize', 'gpt-4o-mini', 1, 1, 400, 100, 0, 0.1, 0),
               ('2026-01-31', 'b,\"c\"', 'mail', 'report', 'big', 2, 5, 9000, 1000, 0, 12, 0),
               ((clock_timestamp() at time zone 'UTC')::date, 'acme', 'default', 'own', '', 1, 1, 7, 0, 0, null, 1)",
        )
        .await;
    queue
}

#[tokio::test]
async fn a_table_for_people() {
    let queue = used().await;
    let table = queue.run(&["usage"]).fine().stdout;
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        lines,
        [
            vec!["MODEL", "ATTEMPTS", "REQUESTS", "INPUT", "CACHED", "OUTPUT", "COST", "USD", "UNPRICED"],
            vec!["big", "2", "5", "9000", "0", "1000", "12.000000", "0"],
            vec!["gpt-4o-mini", "4", "4", "1600", "200", "400", "0.223457", "0"],
            vec!["(not", "named)", "1", "1", "7", "0", "0", "unknown", "1"],
            vec!["total", "7", "10", "10607", "200", "1400", "12.223457", "1"],
        ],
        "{table}"
    );
    // What is the same everywhere has no column.
    let table = queue.run(&["usage", "--by", "day,tenant", "--until", "2026-01-31", "--tenant", "acme"]).fine().stdout;
    assert!(table.starts_with("DAY         TENANT  ATTEMPTS  INPUT  CACHED  OUTPUT  COST USD\n"), "{table}");
    assert!(table.contains("2026-01-30  acme           3   1200     200     300  0.123457\n"), "{table}");
    assert!(table.contains("2026-01-31  acme           1    400       0     100  0.100000\n"), "{table}");
    let nothing = queue.run(&["usage", "--kind", "nobody"]).fine();
    assert!(nothing.stdout.is_empty() && nothing.stderr.contains("no usage"), "{nothing:?}");
}

#[tokio::test]
async fn json_and_csv_for_programs() {
    let queue = used().await;
    let report =
        queue.run(&["usage", "--by", "tenant,model", "--by", "tenant", "--until", "2026-01-31", "--json"]).fine();
    let acme = json!({"tenant": "acme", "model": "gpt-4o-mini", "attempts": 4, "requests": 4, "input_tokens": 1600,
        "output_tokens": 400, "cached_tokens": 200, "cost_usd": "0.223456789", "unpriced": 0});
    assert_eq!(report.json()["rows"][1], acme);
    assert_eq!(report.json()["total"]["cost_usd"], "12.223456789");
    assert_eq!(report.json()["total"]["requests"], 9);
    let today = queue.run(&["usage", "--since", "today", "--json"]).fine().json();
    assert_eq!((&today["rows"][0]["model"], &today["total"]["cost_usd"]), (&json!(null), &json!(null)));
    assert_eq!((&today["total"]["input_tokens"], &today["total"]["unpriced"]), (&json!(7), &json!(1)));
    let csv = queue.run(&["usage", "--by", "tenant", "--csv", "--since", "2026-01-30", "--until", "2026-01-31"]).fine();
    assert_eq!(
        csv.stdout,
        "tenant,attempts,requests,input_tokens,output_tokens,cached_tokens,unpriced,cost_usd\n\
         \"b,\"\"c\"\"\",2,5,9000,1000,0,0,12\n\
         acme,4,4,1600,400,200,0,0.223456789\n"
    );
    let days = queue.run(&["usage", "--by", "day", "--model", "big", "--queue", "mail", "--json"]).fine().json();
    assert_eq!((&days["rows"][0]["day"], &days["rows"][1]), (&json!("2026-01-31"), &json!(null)));
}

#[tokio::test]
async fn many_rows_are_cut_for_people_only() {
    let queue = Queue::new().await;
    queue
        .sql(
            "insert into posthouse.usage_day
             select '2026-01-30', 't' || n, 'q', 'k', 'm', 1, 1, 1, 1, 0, 0.000000001, 0 from generate_series(1, 150) n",
        )
        .await;
    let table = queue.run(&["usage", "--by", "tenant"]).fine().stdout;
    assert!(table.lines().count() == 103 && table.contains("50 more rows"), "{table}");
    assert!(table.contains("<0.000001") && table.contains("total"), "{table}");
    let csv = queue.run(&["usage", "--by", "tenant", "--csv"]).fine().stdout;
    assert_eq!(csv.lines().count(), 151);
}

#[tokio::test]
async fn mistakes_are_named() {
    let queue = Queue::new().await;
    queue.run(&["usage", "--by", "week"]).failed(2, &["week", "tenant, model, kind, day, queue"]);
    queue.run(&["usage", "--since", "2026-02-31"]).failed(2, &["--since", "YYYY-MM-DD"]);
    queue.run(&["usage", "--csv", "--json"]).failed(2, &["--csv and --json"]);
}

/// The block of the guide in this language that contains these words.
fn block(language: &str, words: &str) -> &'static str {
    let fence = format!("```{language}\n");
    let mut blocks = GUIDE.split(&fence).skip(1).filter_map(|rest| rest.split("```").next());
    blocks.find(|block| block.contains(words)).unwrap_or_else(|| panic!("no {language} with {words:?}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_of_the_guide_works_as_it_is_printed() {
    let queue = Queue::new().await;
    let sim = Sim::start(Script::default()).await.unwrap();
    let folder = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("usage-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("prices.json"), block("json", "cost_per_token")).unwrap();
    let config = block("toml", "[prices]").replace("http://127.0.0.1:8080/v1", &sim.base_url());
    std::fs::write(folder.join("posthouse.toml"), config).unwrap();
    let posthouse = queue.command(&[]);
    let mut shell = Command::new("sh");
    shell.args(["-ec", &format!("posthouse() {{ \"$0\" \"$@\"; }}\n{}", block("sh", "enqueue"))]);
    shell.arg(posthouse.get_program()).env_clear().current_dir(&folder);
    shell.envs(posthouse.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let said = answer(&mut shell, None).fine().stdout;
    std::fs::remove_dir_all(&folder).unwrap();
    let table = block("text", "TENANT");
    assert!(said.ends_with(table), "{said}\nis not as in the guide:\n{table}");
}
