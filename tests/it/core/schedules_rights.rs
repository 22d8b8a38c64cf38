//! Schedules where tenants log in themselves: people who operate the queue set them, workers fire them for everybody, and a tenant sees his own.

use std::time::SystemTime;

use posthouse::store::Database;
use posthouse::sweep::fire_schedules_at;
use tokio_postgres::NoTls;

use super::support::{Queue, Session};

#[tokio::test]
async fn operators_set_workers_fire_and_tenants_see_their_own() {
    let (queue, admin) = Queue::with_session().await;
    let mark = uuid::Uuid::new_v4().simple().to_string();
    let url = |login: &str| {
        let (_, server) = queue.url().rsplit_once('@').unwrap();
        format!("postgres://{login}_{mark}:sesame@{server}")
    };
    let session = async |login: &str| {
        let (client, connection) = tokio_postgres::connect(&url(login), NoTls).await.unwrap();
        tokio::spawn(connection);
        Session { client, pid: 0 }
    };
    admin.run("select posthouse.isolate()").await;
    for (login, role) in [("people", "operate"), ("workers", "worker"), ("acme", "enqueue"), ("acme", "read")] {
        let name = format!("{login}_{mark}");
        if role != "read" {
            admin.run(&format!("create role {name} login password 'sesame'")).await;
        }
        admin.run(&format!("grant posthouse_{role} to {name}")).await;
    }
    admin.run(&format!("select posthouse.bind_login('acme_{mark}', 'acme')")).await;
    let (people, workers, acme) = (session("people").await, session("workers").await, session("acme").await);
    for tenant in ["acme", "bolt"] {
        let job = format!("{{\"kind\": \"k\", \"tenant\": \"{tenant}\"}}");
        people.run(&format!("select posthouse.set_schedule('{tenant}', '* * * * *', '{job}')")).await;
        assert_eq!(acme.refused(&format!("select posthouse.set_schedule('x', '@daily', '{job}')")).await.code, "42501");
        assert_eq!(
            workers.refused(&format!("select posthouse.set_schedule('x', '@daily', '{job}')")).await.code,
            "42501"
        );
    }
    admin.run("update posthouse.schedule set next_at = date_trunc('minute', clock_timestamp())").await;
    let store = Database::new(&url("workers")).unwrap().store("sweep");
    assert_eq!(fire_schedules_at(&store, SystemTime::now()).await.unwrap().jobs, 2);
    assert_eq!(workers.list::<String>("select name from posthouse.schedules order by name").await, ["acme", "bolt"]);
    assert_eq!(
        people.list::<String>("select schedule from posthouse.schedule_runs order by 1").await,
        ["acme", "bolt"]
    );
    assert_eq!(acme.list::<String>("select name from posthouse.schedules").await, ["acme"]);
    assert_eq!(acme.list::<String>("select schedule from posthouse.schedule_runs").await, ["acme"]);
    for call in ["due_schedules(1)", "remove_schedule('acme')", "pause_schedule('acme')", "resume_schedule('acme')"] {
        assert_eq!(acme.refused(&format!("select posthouse.{call}")).await.code, "42501", "{call}");
    }
    drop((people, workers, acme));
    for login in ["people", "workers", "acme"] {
        let name = format!("{login}_{mark}");
        admin.run(&format!("drop owned by {name}; drop role {name}")).await;
    }
}
