//! Proper answers, however oddly they arrive.

use crate::{Pair, fault, step};
use posthouse_llm::sim::{Fault, Script, expected_answer};
use posthouse_llm::{CHAT, ErrorClass};
use serde_json::{Value, json};

#[tokio::test]
async fn a_summary_with_all_that_is_stored() {
    let pair = Pair::new(Script { tokens_per_second: Some(500.0), ..Script::default() }).await;
    let answer = pair.summarize("A tale of a horse. It went on.").await.unwrap();
    let expected = expected_answer("A tale of a horse. It went on.");
    assert_eq!(answer.text, expected);
    let result: Value = serde_json::from_str(answer.result_json().get()).unwrap();
    assert_eq!(result["text"], Value::from(expected.clone()));
    assert_eq!(result["message"], json!({ "role": "assistant", "content": expected }));
    assert_eq!(
        (&result["finish_reason"], &result["truncated"], &result["cleaned"]),
        (&json!("stop"), &json!(false), &json!(false))
    );
    assert_eq!(
        (&result["model"], &result["endpoint"], &result["provider_request_id"]),
        (&json!("up"), &json!("sim"), &json!("req-sim-1"))
    );
    let usage = answer.usage_json();
    assert!(usage["input_tokens"].as_u64().unwrap() > 10 && usage["output_tokens"].as_u64().unwrap() > 3, "{usage}");
    assert!(usage["first_token_ms"].as_u64().unwrap() <= usage["latency_ms"].as_u64().unwrap());
    assert_eq!((&usage["status"], &usage["endpoint"], &usage["model"]), (&json!(200), &json!("sim"), &json!("up")));
    assert!(pair.sim.stats().last[0].stream, "it always streams inside");
}

#[tokio::test]
async fn the_same_answer_in_every_form() {
    for form in [Fault::NoStream, Fault::NoUsage, Fault::Bytewise] {
        let answer = Pair::new(form).await.summarize("Größe. 😀").await.unwrap();
        assert_eq!(answer.text, expected_answer("Größe. 😀"), "{form}");
        assert_eq!(answer.usage.output_tokens.is_none(), form == Fault::NoUsage);
    }
}

#[tokio::test]
async fn a_finish_reason_is_enough_even_if_the_stream_never_ends() {
    let pair = Pair::with(Fault::NoEnd, "timeouts = { between_tokens_ms = 200 }", "").await;
    let answer = pair.summarize("One.").await.unwrap();
    assert_eq!((answer.text, answer.finish_reason.as_deref()), (expected_answer("One."), Some("stop")));
}

#[tokio::test]
async fn what_no_database_takes_is_replaced_and_flagged() {
    for form in [Fault::Nul, Fault::Surrogate] {
        let answer = Pair::new(form).await.summarize("One.").await.unwrap();
        let stored = answer.result_json();
        assert!(
            answer.cleaned && answer.text.contains('\u{FFFD}') && answer.text.contains(&expected_answer("One.")),
            "{form}: {stored}"
        );
        assert!(!stored.get().contains("\\u0000") && !answer.text.contains('\0'));
    }
}

#[tokio::test]
async fn a_cut_text_is_kept_and_marked_unless_the_kind_says_otherwise() {
    let strict = "[kinds.strict]\nuser = \"{{ text }}\"\non_truncated = \"fail\"";
    let pair = Pair::with(Fault::Length, "", strict).await;
    let answer = pair.summarize("One two three four five six.").await.unwrap();
    assert!(answer.truncated && answer.finish_reason.as_deref() == Some("length"));
    let error = pair.run("strict", r#"{"text":"a"}"#).await.unwrap_err();
    crate::assert_error(&error, ErrorClass::Truncated, "truncated", Some(200));
    assert!(error.usage.output_tokens.is_some(), "it was paid all the same");
}

#[tokio::test]
async fn a_cut_answer_that_is_empty_or_json_fails_as_truncated() {
    let json_kind = "[kinds.json]\nuser = \"{{ text }}\"\nschema = { type = \"object\" }";
    let pair = Pair::with(step("do=length,after_tokens=1"), "", json_kind).await;
    let error = pair.run("json", r#"{"text":"a"}"#).await.unwrap_err();
    crate::assert_error(&error, ErrorClass::Truncated, "truncated", Some(200));
    let body =
        json!({ "messages": [{ "role": "user", "content": "x" }], "response_format": { "type": "json_object" } });
    let error = pair.run(CHAT, &body.to_string()).await.unwrap_err();
    crate::assert_error(&error, ErrorClass::Truncated, "truncated", Some(200));
    let pair = Pair::new(step("do=length,after_tokens=0")).await;
    crate::assert_error(&pair.fails().await, ErrorClass::Truncated, "truncated", Some(200));
}

#[tokio::test]
async fn a_schema_is_checked_and_numbers_keep_their_digits() {
    let kind = "[kinds.count]\nuser = \"{{ text }}\"\nschema = { type = \"object\", required = [\"n\"], properties = { n = { type = \"integer\" } } }";
    let pair = Pair::with(step(r#"match=good,do=say,text={"n":9007199254740993}"#), "", kind).await;
    let answer = pair.run("count", r#"{"text":"good"}"#).await.unwrap();
    assert_eq!(answer.json.as_ref().unwrap().get(), r#"{"n":9007199254740993}"#);
    assert!(answer.result_json().get().contains(r#""json":{"n":9007199254740993}"#));
    let error = pair.run("count", r#"{"text":"bad"}"#).await.unwrap_err();
    crate::assert_error(&error, ErrorClass::Schema, "schema", Some(200));
    assert!(error.message.contains("\"n\" is a required property"), "{error}");
}

#[tokio::test]
async fn chat_as_it_is_with_tools() {
    let pair = Pair::new(Fault::ToolCall).await;
    let body = json!({ "model": "up", "messages": [{ "role": "user", "content": [{ "type": "text", "text": "Look it up." }] }] });
    let answer = pair.run(CHAT, &body.to_string()).await.unwrap();
    assert_eq!((answer.finish_reason.as_deref(), answer.text.as_str()), (Some("tool_calls"), ""));
    let arguments = answer.message["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(arguments).unwrap(), json!({ "input": expected_answer("Look it up.") }));
}

#[tokio::test]
async fn what_is_wrong_with_the_job_costs_no_request() {
    let pair = Pair::new(fault(Fault::Ok)).await;
    for (kind, payload, code) in [
        ("sumarize", "{}", "unknown_kind"),
        ("summarize", r#"{"txt":"x"}"#, "bad_payload"),
        (CHAT, r#"{"messages":[],"model":"gpt-9"}"#, "unknown_model"),
        (CHAT, "[]", "bad_payload"),
    ] {
        let error = pair.run(kind, payload).await.unwrap_err();
        crate::assert_error(&error, ErrorClass::Terminal, code, None);
        assert_eq!(pair.engine.check(kind, payload).unwrap_err().code, code);
    }
    assert_eq!(pair.sim.stats().requests, 0);
    assert_eq!(pair.engine.kinds(), ["llm.chat", "summarize"]);
    assert_eq!(pair.engine.fields("summarize").unwrap(), ["text"]);
}
