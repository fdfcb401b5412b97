//! What both kinds of worker actor share: mailbox in, machine, effects out.
//!
//! Owns: the links, the calls that wait, the commands to the engine, the timer. A [`Side`] is the
//! room machine of one role with the handles of its serving engine; [`Worker`] puts the shell round
//! it. In: sessions, frames, calls, events of the engine, time. Out: whatever the machines want,
//! carried out in their order until all of them are still.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use actix::prelude::*;
use kvlane_proto::decode::CallId;
use kvlane_proto::link::{Event, LinkConfig};
use kvlane_proto::msg::Purpose;
use kvlane_proto::msg::call::Call;
use kvlane_proto::msg::service::Load;
use kvlane_proto::{ErrorKind, Identity, Refusal, Time};
use kvlane_transport::clock::now;
use kvlane_transport::engine::EngineEvent;
use kvlane_transport::quic::{Endpoint, Session};
use tokio::sync::{Semaphore, oneshot, watch};

use crate::calls::{CallIn, Calls, CallsGone};
use crate::engine::{Commands, Inbox};
use crate::hooks::Hooks;
use crate::links::{LinkIn, Links, News};
use crate::outages::{Outages, Told};
use crate::runtime::{EngineWake, Fate, Parts, SessionIn, Stop, WorkerEnd};

/// Dials to prefill workers at a time.
const DIALS_MAX: usize = 64;
/// A timer that is so late says that the process was stopped, or its machine.
const STOOD_STILL_MS: u64 = 1_000;

/// The part of a worker that its role makes.
pub(crate) trait Side: Sized + Unpin + 'static {
    /// Carries out the machine's next output; says whether there was one.
    fn step(&mut self, shell: &mut Shell, ctx: &mut Context<Worker<Self>>) -> bool;
    /// What a link means for the rooms.
    fn news(&mut self, now: Time, shell: &mut Shell, news: News);
    /// An event of the engine; lanes and answers about links are the shell's own.
    fn engine(&mut self, now: Time, shell: &mut Shell, event: EngineEvent);
    /// A call of a router or admin.
    fn call(&mut self, now: Time, shell: &mut Shell, call: CallId, from: Identity, body: Call);
    /// Nobody waits for the answer any more.
    fn call_gone(&mut self, now: Time, call: CallId);
    /// No new rooms from here on.
    fn drain(&mut self, now: Time);
    /// Does what is due.
    fn handle_timeout(&mut self, now: Time);
    /// The process stood still: waits for the engine begin anew.
    fn stood_still(&mut self, now: Time);
    /// When [`Side::handle_timeout`] is due.
    fn poll_timeout(&self) -> Option<Time>;
    /// How busy the rooms are.
    fn load(&self) -> Load;
}

/// The part of a worker that is the same for both roles.
pub(crate) struct Shell {
    pub(crate) links: Links,
    pub(crate) calls: Calls,
    pub(crate) engine: Rc<Commands>,
    pub(crate) endpoint: Endpoint,
    pub(crate) dials: Arc<Semaphore>,
    pub(crate) news: VecDeque<News>,
    inbox: Inbox,
    outages: Outages,
    /// Of the engine's troubles.
    told: Told,
    load: watch::Sender<Load>,
    timer: Option<(Time, SpawnHandle)>,
    fate: Fate,
    _alive: oneshot::Sender<()>,
    /// The worker may play dead, for tests.
    pub(crate) hooks: Hooks,
}

/// A worker's actor.
pub(crate) struct Worker<S> {
    pub(crate) side: S,
    pub(crate) shell: Shell,
}

impl<S: Side> Worker<S> {
    pub(crate) fn new(parts: Parts, link: LinkConfig, side: S) -> Self {
        let Parts { config, endpoint, engine, caps, inbox, load, fate, alive, .. } = parts;
        let engine = Rc::new(engine);
        let shell = Shell {
            links: Links::new(link, config.pools.maps, engine.clone(), caps),
            calls: Calls::default(),
            engine,
            endpoint,
            dials: Arc::new(Semaphore::new(DIALS_MAX)),
            news: VecDeque::new(),
            inbox,
            outages: Outages::default(),
            told: Told::default(),
            load,
            timer: None,
            fate,
            _alive: alive,
            hooks: Hooks::default(),
        };
        Self { side, shell }
    }

    /// Carries out what the machines want, until all of them are still.
    pub(crate) fn drive(&mut self, ctx: &mut Context<Self>) {
        self.settle(ctx);
        let load = self.side.load();
        self.shell.load.send_if_modified(|old| std::mem::replace(old, load) != load);
        self.arm(ctx);
    }

    fn settle(&mut self, ctx: &mut Context<Self>) {
        loop {
            while self.side.step(&mut self.shell, ctx) {}
            let Some(news) = self.shell.news.pop_front() else { break };
            let lost = match &news {
                News::Lost { link, .. } => Some(*link),
                News::Up { .. } | News::Deliver { .. } => None,
            };
            self.side.news(now(), &mut self.shell, news);
            if let Some(link) = lost {
                // The rooms ask for their fences first.
                while self.side.step(&mut self.shell, ctx) {}
                self.shell.links.close_engine(link);
                self.shell.outages.forget(link);
            }
        }
    }

    fn take_events(&mut self, ctx: &mut Context<Self>) {
        // What an engine says in one breath happened at one time: a lane that came up, and the word
        // that lets the peer use it.
        let now = now();
        for event in self.shell.inbox.take() {
            if self.shell.hooks.stopped() {
                return;
            }
            self.engine_event(now, event, ctx);
        }
    }

    fn engine_event(&mut self, now: Time, event: EngineEvent, ctx: &mut Context<Self>) {
        let Shell { links, outages, told, .. } = &mut self.shell;
        let news = match &event {
            EngineEvent::LaneUp { link, lane } => {
                outages.up(*link, *lane);
                links.handle(now, *link, Event::LaneUp(*lane))
            }
            EngineEvent::LaneDown { link, lane, why } => {
                tracing::debug!(link = link.0, lane = lane.0, %why, "lane is down");
                metrics::counter!("kvlane_lanes_lost_total").increment(1);
                if links.peer(*link).is_some() {
                    outages.down(now, *link, *lane, why);
                }
                links.handle(now, *link, Event::LaneDown(*lane, why.clone()))
            }
            EngineEvent::Scrapped { bytes, why, .. } => {
                return tracing::debug!(bytes, %why, "frame read to scrap");
            }
            EngineEvent::Trouble(e) => {
                if let Some(left_out) = told.turn(now) {
                    tracing::error!(error = %e, left_out, "engine");
                }
                return;
            }
            EngineEvent::Chosen { link, engine } => return links.chosen(*link, engine),
            _ => Vec::new(),
        };
        if !news.is_empty() {
            // The rooms know a link before they hear what becomes of its lanes.
            self.shell.news.extend(news);
            self.settle(ctx);
        }
        match event {
            EngineEvent::Local { link, blob } => {
                let news = self.shell.links.local(now, link, blob);
                self.shell.news.extend(news);
            }
            EngineEvent::Tell { link, message } => {
                let news = self.shell.links.tell(now, link, message);
                self.shell.news.extend(news);
            }
            event => self.side.engine(now, &mut self.shell, event),
        }
    }

    fn arm(&mut self, ctx: &mut Context<Self>) {
        let shell = &mut self.shell;
        let due = [self.side.poll_timeout(), shell.links.next_timeout(), shell.outages.due()];
        let mut next = due.into_iter().flatten().min();
        if shell.engine.flush() {
            let soon = now().plus_ms(1);
            next = Some(next.map_or(soon, |n| n.min(soon)));
        }
        // Every frame moves the links' deadlines on. A timer that fires early does nothing and is set
        // anew then, which is cheaper than setting it anew for every frame.
        if shell.timer.is_some_and(|(armed, _)| next.is_none_or(|next| armed <= next)) {
            return;
        }
        if let Some((_, old)) = shell.timer.take() {
            ctx.cancel_future(old);
        }
        if let Some(at) = next {
            shell.timer = Some((at, ctx.run_later(now().until(at), Self::tick)));
        }
    }

    fn tick(&mut self, ctx: &mut Context<Self>) {
        let due = self.shell.timer.take().map(|t| t.0);
        if self.shell.hooks.stopped() {
            return;
        }
        // What has happened already counts before what has not.
        self.take_events(ctx);
        let now = now();
        let late_ms = due.map_or(0, |due| now.ms_since(due));
        if late_ms > STOOD_STILL_MS {
            tracing::warn!(late_ms, "this process stood still");
            metrics::counter!("kvlane_stood_still_total").increment(1);
            self.side.stood_still(now);
            self.shell.links.stood_still(now);
        }
        self.side.handle_timeout(now);
        for (link, lanes, why) in self.shell.outages.take(now) {
            if let Some(peer) = self.shell.links.peer(link) {
                tracing::warn!(%peer, ?lanes, %why, "lanes are lost and do not come back");
            }
        }
        let news = self.shell.links.timeout(now);
        self.shell.news.extend(news);
        self.drive(ctx);
    }
}

impl<S: Side> Actor for Worker<S> {
    type Context = Context<Self>;
}

/// Take no new rooms.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct Drain;

impl<S: Side> Handler<Drain> for Worker<S> {
    type Result = ();
    fn handle(&mut self, _: Drain, ctx: &mut Context<Self>) {
        self.side.drain(now());
        self.drive(ctx);
    }
}

impl<S: Side> Handler<Stop> for Worker<S> {
    type Result = ();
    fn handle(&mut self, Stop(why): Stop, ctx: &mut Context<Self>) {
        let end = match why.kind {
            ErrorKind::Draining => WorkerEnd::Stopped,
            _ => WorkerEnd::Failed(why.clone()),
        };
        self.shell.fate.set(end);
        self.shell.links.bye(now(), &why);
        self.shell.engine.stop();
        ctx.stop();
    }
}

impl<S: Side> Handler<SessionIn> for Worker<S> {
    type Result = ();
    fn handle(&mut self, SessionIn(session): SessionIn, ctx: &mut Context<Self>) {
        match session.purpose {
            Purpose::Call => self.shell.calls.open(session, &ctx.address()),
            Purpose::Peer => self.link(session, ctx),
            // The greeting lets nobody else in.
            Purpose::Service => {}
        }
    }
}

impl<S: Side> Worker<S> {
    /// Makes a session with another worker a link.
    pub(crate) fn link(&mut self, session: Session, ctx: &mut Context<Self>) {
        let news = self.shell.links.open(now(), session, &ctx.address());
        self.shell.news.extend(news);
        self.drive(ctx);
    }
}

impl<S: Side> Handler<LinkIn> for Worker<S> {
    type Result = ();
    fn handle(&mut self, LinkIn { link, event }: LinkIn, ctx: &mut Context<Self>) {
        if self.shell.hooks.stopped() {
            return;
        }
        let news = self.shell.links.handle(now(), link, event);
        self.shell.news.extend(news);
        self.drive(ctx);
    }
}

impl<S: Side> Handler<CallIn> for Worker<S> {
    type Result = ();
    fn handle(&mut self, call: CallIn, ctx: &mut Context<Self>) {
        if self.shell.hooks.stopped() {
            return;
        }
        let Some(id) = self.shell.calls.enter(&call) else { return };
        self.side.call(now(), &mut self.shell, id, call.from, call.frame.call);
        self.drive(ctx);
    }
}

impl<S: Side> Handler<CallsGone> for Worker<S> {
    type Result = ();
    fn handle(&mut self, gone: CallsGone, ctx: &mut Context<Self>) {
        for call in self.shell.calls.gone(gone.session) {
            self.side.call_gone(now(), call);
        }
        self.drive(ctx);
    }
}

impl<S: Side> Handler<EngineWake> for Worker<S> {
    type Result = ();
    fn handle(&mut self, EngineWake(alive): EngineWake, ctx: &mut Context<Self>) {
        self.take_events(ctx);
        self.drive(ctx);
        if !alive {
            let why = Refusal::new(ErrorKind::Internal, "the engine's thread has ended");
            self.shell.fate.set(WorkerEnd::Failed(why));
            ctx.stop();
        }
    }
}
