//! What calls cost, from the tokens that the provider told to the sum in the database.

use crate::{Pair, engine, within};
use posthouse::store::{Database, UsageFilter, schema_sql};
use posthouse::testing::TestDatabase;
use posthouse::{NewJob, Posthouse, Worker};
use posthouse_llm::sim::{Script, Sim};
use std::time::Duration;

const PRICE: &str = "price = { input = 0.15, output = \"0.6\", per_request = \"0.000000001\" }";

/// By this price, in thousandths of a millionth of a dollar.
fn nanodollars(input: u64, output: u64) -> u64 {
    150 * input + 600 * output + 1
}

fn dollars(nanodollars: u64) -> String {
    let text = format!("{}.{:09}", nanodollars / 1_000_000_000, nanodollars % 1_000_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[tokio::test]
async fn an_answer_tells_its_cost_where_a_price_is_known() {
    let text = "Ten words that somebody wants to have made shorter today.";
    let priced = Pair::with(Script::default(), PRICE, "").await.summarize(text).await.unwrap();
    let (input, output) = (priced.usage.input_tokens.unwrap(), priced.usage.output_tokens.unwrap());
    assert!(input > 0 && output > 0);
    assert_eq!(priced.usage_json()["cost_usd"], dollars(nanodollars(input, output)));
    let unpriced = Pair::new(Script::default()).await.summarize(text).await.unwrap();
    assert!(unpriced.usage_json()["cost_usd"].is_null(), "{}", unpriced.usage_json());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_attempt_is_added_up_exactly() {
    let database = TestDatabase::new(&schema_sql(), async |url: &str| Posthouse::migrate(url).await).await;
    let lines = ["match=busy,tries=1,do=429,retry_after_ms=100", "match=flaky,tries=1,do=500", "match=hopeless,do=401"];
    let script = Script { steps: lines.iter().map(|line| line.parse().unwrap()).collect(), ..Script::default() };
    let sim = Sim::start(script).await.unwrap();
    let queue = Posthouse::new(Database::new(database.url()).unwrap());
    let texts = ["A plain one.", "A busy one.", "A flaky one.", "A hopeless one.", "Another plain one, and longer."];
    let jobs =
        texts.map(|text| NewJob::from_json("summarize", serde_json::json!({ "text": text }).to_string()).unwrap());
    let ids: Vec<i64> = queue.enqueue_many(&jobs).await.unwrap().iter().map(|job| job.id).collect();
    let worker = Worker::builder(Database::new(database.url()).unwrap());
    let worker = worker.poll(Duration::from_millis(50)).until_empty(true);
    within(engine(&sim.base_url(), PRICE, "").register(worker).run()).await.unwrap();
    let (mut input, mut output, mut cost) = (0, 0, 0);
    for id in ids {
        let usage = queue.job(id).await.unwrap().unwrap().usage.unwrap();
        if let (Some(inputs), Some(outputs)) = (usage["input_tokens"].as_u64(), usage["output_tokens"].as_u64()) {
            (input, output, cost) = (input + inputs, output + outputs, cost + nanodollars(inputs, outputs));
        }
    }
    let total = queue.usage(&UsageFilter::default()).await.unwrap().total;
    assert_eq!((total.input_tokens.unsigned_abs(), total.output_tokens.unsigned_abs()), (input, output));
    assert_eq!(total.cost_usd, Some(dollars(cost)));
    // Refused ones are counted, and cost nothing.
    assert_eq!((total.attempts, total.requests, total.unpriced), (7, 7, 0));
    assert_eq!(sim.stats().requests, 7);
}
