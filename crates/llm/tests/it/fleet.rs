//! Workers that share their gates through a database: what one is told, all heed.

use crate::queue::{database, summarize};
use crate::{step, within};
use posthouse::store::Database;
use posthouse::testing::TestDatabase;
use posthouse::{NewJob, Posthouse, Worker};
use posthouse_llm::sim::{Script, Sim};
use posthouse_llm::{Attempt, Config, Engine, ErrorClass};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn queue(database: &TestDatabase) -> Posthouse {
    Posthouse::new(Database::new(database.url()).unwrap())
}

/// An engine of a further process, which shares its gates.
async fn engine(sims: &[&Sim], database: &TestDatabase) -> Engine {
    let mut text = String::new();
    let mut route = Vec::new();
    for (number, sim) in sims.iter().enumerate() {
        text.push_str(&format!("[providers.p{number}]\nbase_url = \"{}\"\n", sim.base_url()));
        route.push(format!("{{ provider = \"p{number}\", model = \"up\" }}"));
    }
    text.push_str(&format!("[models.m]\nroute = [{}]\n", route.join(", ")));
    let engine = Engine::from_config(&Config::parse(&text, Path::new("")).unwrap()).unwrap();
    engine.share(queue(database).database()).await.unwrap()
}

async fn ask(engine: &Engine) -> Result<String, (ErrorClass, String)> {
    let answer = within(engine.run("summarize", r#"{"text":"x"}"#, Attempt::default())).await;
    answer.map(|answer| answer.endpoint).map_err(|error| (error.class, error.code.clone()))
}

/// Workers, each as in a process of its own, until they are told to stop.
struct Fleet {
    stop: Arc<AtomicBool>,
    workers: Vec<tokio::task::JoinHandle<posthouse::Result<posthouse::worker::Summary>>>,
}

impl Fleet {
    async fn start(workers: usize, sims: &[&Sim], database: &TestDatabase) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut fleet = Self { stop: stop.clone(), workers: Vec::new() };
        for _ in 0..workers {
            let worker = Worker::builder(Database::new(database.url()).unwrap())
                .poll(Duration::from_millis(100))
                .concurrency(20);
            let (worker, stop) = (engine(sims, database).await.register(worker), stop.clone());
            fleet.workers.push(tokio::spawn(async move {
                worker
                    .run_until(async move {
                        while !stop.load(Ordering::Acquire) {
                            tokio::time::sleep(Duration::from_millis(10)).await;
                        }
                    })
                    .await
            }));
        }
        fleet
    }

    async fn stop(self) {
        self.stop.store(true, Ordering::Release);
        for worker in self.workers {
            within(worker).await.unwrap().unwrap();
        }
    }
}

async fn enqueue(database: &TestDatabase, jobs: usize) -> Vec<i64> {
    let jobs: Vec<NewJob> = (0..jobs).map(|number| summarize(&format!("Text {number}."))).collect();
    queue(database).enqueue_many(&jobs).await.unwrap().iter().map(|job| job.id).collect()
}

/// Waits until all jobs are done, and checks that each took one attempt.
async fn all_done(database: &TestDatabase, ids: &[i64]) {
    let queue = queue(database);
    let deadline = tokio::time::Instant::now() + Duration::from_secs(40);
    loop {
        let states = queue.states(ids).await.unwrap();
        if states.iter().all(|(_, state)| state == "done") {
            break;
        }
        let open: Vec<_> = states.iter().filter(|(_, state)| state != "done").take(3).collect();
        if tokio::time::Instant::now() > deadline {
            panic!("not done: {open:?} {:?} {:?}", queue.explain(open[0].0).await, queue.gates().await);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for id in ids {
        let job = queue.job(*id).await.unwrap().unwrap();
        assert_eq!(job.attempt, 1, "nothing was charged: {job:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_is_told_all_heed() {
    let database = database().await;
    let sim = Sim::start(step("first=1,do=429,retry_after=60s")).await.unwrap();
    let (one, two) = (engine(&[&sim], &database).await, engine(&[&sim], &database).await);
    assert_eq!(ask(&one).await.unwrap_err(), (ErrorClass::NotNow, "rate_limit_exceeded".to_owned()));
    assert_eq!(ask(&two).await.unwrap_err(), (ErrorClass::NotNow, "rate_limited".to_owned()));
    assert_eq!(sim.stats().requests, 1);
    let gates = queue(&database).gates().await.unwrap();
    let gate = gates.iter().find(|gate| gate.name == "endpoint:p0/up").unwrap();
    assert_eq!(gate.closed_by.as_deref(), Some("provider"), "{gate:?}");
    assert!(gate.closed_reason.as_ref().unwrap().contains("429 Too Many Requests"), "{gate:?}");
    queue(&database).open_gate("endpoint:p0/up").await.unwrap();
    assert_eq!(ask(&two).await.unwrap(), "p0", "opened by a person, it is open at once");
}

/// Waits until a gate is closed.
async fn closed(queue: &Posthouse, name: &str) {
    within(async {
        while queue.gates().await.unwrap().iter().all(|gate| gate.name != name || gate.closed_by.is_none()) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_account_is_asked_once_and_its_jobs_keep_their_place() {
    let database = database().await;
    let sim = Sim::start(step("first=1,do=insufficient_quota")).await.unwrap();
    let ids = enqueue(&database, 100).await;
    let fleet = Fleet::start(1, &[&sim], &database).await;
    let (reason, queue) = ("endpoint:p0/up", queue(&database));
    closed(&queue, reason).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(sim.stats().requests, 1, "one request, and not a hundred");
    let states = queue.states(&ids).await.unwrap();
    assert!(states.iter().all(|(_, state)| state == "queued"), "{states:?}");
    assert!(queue.open_gate(reason).await.unwrap());
    all_done(&database, &ids).await;
    fleet.stop().await;
    assert_eq!(sim.stats().requests, 101);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_account_that_refuses_slowly_is_asked_a_few_times_also_after_it_was_opened() {
    let database = database().await;
    let sim = Sim::start(step("do=insufficient_quota,latency=400ms")).await.unwrap();
    let ids = enqueue(&database, 80).await;
    let fleet = Fleet::start(2, &[&sim], &database).await;
    let (name, queue) = ("endpoint:p0/up", queue(&database));
    for round in 1..=2 {
        closed(&queue, name).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let requests = sim.stats().requests;
        assert!((round..=10 * round).contains(&requests), "{requests} requests of 2 processes in {round} rounds");
        assert!(queue.open_gate(name).await.unwrap());
    }
    fleet.stop().await;
    let states = queue.states(&ids).await.unwrap();
    assert!(states.iter().all(|(_, state)| state == "queued"), "{states:?}");
}

/// Sends jobs into a provider that refuses for some seconds, and returns how many requests it refused.
async fn refused_during(step: &str) -> u64 {
    let database = database().await;
    let sim = Sim::start(Script::parse(&format!("[[step]]\n{step}\ndo = 429")).unwrap()).await.unwrap();
    let ids = enqueue(&database, 30).await;
    let fleet = Fleet::start(2, &[&sim], &database).await;
    all_done(&database, &ids).await;
    fleet.stop().await;
    let refused = sim.stats().outcomes["429"];
    assert_eq!(sim.stats().requests - refused, 30, "every job is answered once");
    refused
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_of_refusals_costs_one_request_and_charges_nobody() {
    // One a process at most, and one more if the window is a little longer than it said.
    let refused = refused_during("before = \"3s\"").await;
    assert!((1..=3).contains(&refused), "{refused} requests were sent into the window");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_that_refuses_again_and_again_gets_one_probe_a_time() {
    let refused = refused_during("before = \"5s\"\nretry_after = \"1s\"").await;
    assert!((2..=7).contains(&refused), "{refused} requests: one a process, and a probe a second");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_goes_on_by_its_other_endpoint() {
    let database = database().await;
    let (one, two) =
        (Sim::start(step("do=429,retry_after=60s")).await.unwrap(), Sim::start(Script::default()).await.unwrap());
    let ids = enqueue(&database, 30).await;
    let fleet = Fleet::start(1, &[&one, &two], &database).await;
    all_done(&database, &ids).await;
    fleet.stop().await;
    assert_eq!((one.stats().requests, two.stats().requests), (1, 30));
}
