--[[
The operations. Every one has two halves: `check` only reads, and answers with a refusal, an outcome or the task; `write`
cannot be refused. A transaction checks all of its operations and then writes them all, so nothing ever has to be undone.
]]

-- A refusal names the task as it stands, or whose key it is, for the words that Python finds.
local function refuse(kind, ...) return {refused = {kind, ...}} end
local function refuse_as(kind, t) return refuse(kind, CODE[t.state], t.attempt) end
local function outcome(...) return {outcome = {...}} end

-- -- checks ----------------------------------------------------------------------------------------

local function known_key(op)
  local q = queue(op.queue)
  local key = store.key(q, op.key)
  if not key then return nil end
  local first = store.find(q, key.id)
  if first and first.state == 'staged' then return first end
  if key.expires_ms <= now and (not first or FINAL[first.state]) then return nil end
  if key.fingerprint ~= op.fingerprint then return refuse('IdempotencyConflict', key.id) end
  return outcome(key.id, 1, first and CODE[first.state] or CODE.completed)
end

local function existed(t) return outcome(t.id, 1, CODE[t.state]) end

function check.enqueue(op)
  local q, staged = queue(op.queue), nil
  if op.key then
    local first = known_key(op)
    if first and first.state ~= 'staged' then return first end
    staged = first -- of a run that may never be committed: whoever enqueues now is not kept waiting
  end
  local t = store.find(q, op.id)
  if store.occupied[slot(q, op.id)] then return refuse('DuplicateId') end
  if not t or t.state == 'staged' then return staged or t end
  local same = not t.foreign and t.fingerprint == op.fingerprint
  if op.on_conflict == 'replace_finished' then
    if FINAL[t.state] and not (request.again and same) then return staged end
    return existed(t)
  end
  if op.on_conflict == 'return' or same then return existed(t) end
  return refuse('DuplicateId')
end

local function of(op)
  return store.load(queue(op.queue), op.id)
end

-- The same end reported twice, by the token that ended the task, changes nothing.
local function already(op, t)
  if not t.ended_by or t.ended_by ~= op.token then return nil end
  if op.kind == 'ack' and t.state == 'completed' then return outcome(CODE.completed, 1) end
  if op.kind == 'fail' and (t.state == 'completed' or t.state == 'failed') then
    return outcome(t.q.name, CODE[t.state], 1)
  end
  return nil
end

local function held(op)
  local t = of(op)
  if not t then return refuse('TaskNotFound') end
  if t.state ~= 'active' then return already(op, t) or refuse_as('NotActive', t) end
  if t.stored == 'active' and not store.leased(t.q, {t.id})[1] then return refuse('NotActive') end
  if not op.late and t.lock_until_ms <= now then return refuse('LeaseExpired') end
  if t.lease_token ~= op.token then return refuse('TokenMismatch') end
  return t
end

-- The reaper speaks: it must have seen this very lease, and the lease must be over or its worker dead.
local function lost(op)
  local t = of(op)
  if not t then return refuse('TaskNotFound') end
  if t.state ~= 'active' then return refuse_as('NotActive', t) end
  if t.lease_token ~= op.token then return refuse('TokenMismatch') end
  if op.lost == 'expired' and t.lock_until_ms > now then
    local score = store.leased(t.q, {t.id})[1] -- by which every client reaps, whatever the task's own field says
    if not score or tonumber(score) > now then return refuse('LeaseHeld') end
  end
  return t
end

local function lost_or_held(op)
  if op.lost then return lost(op) end
  return held(op)
end

check.ack, check.release, check.extend, check.progress = held, held, held, held
check.retry, check.fail = lost_or_held, lost_or_held

function check.cancel(op)
  if op.lost then return lost(op) end
  local t = of(op)
  if not t then return refuse('TaskNotFound') end
  if FINAL[t.state] then return outcome(CODE[t.state]) end
  if t.state == 'staged' then return refuse_as('NotWaiting', t) end
  if op.token then
    if t.state ~= 'active' then return refuse_as('NotActive', t) end
    if t.lease_token ~= op.token then return refuse('TokenMismatch') end
  end
  return t
end

function check.reschedule(op)
  local t = of(op)
  if not t then return refuse('TaskNotFound') end
  if not WAITING[t.state] then return refuse_as('NotWaiting', t) end
  return t
end

function check.requeue(op)
  local t = of(op)
  if not t then return refuse('TaskNotFound') end
  if t.state ~= 'failed' then return refuse_as('NotDead', t) end
  return t
end

function check.remove(op)
  local t = of(op)
  if not t then return refuse('TaskNotFound') end
  if t.state == 'active' or t.state == 'staged' then return refuse_as('NotWaiting', t) end
  if op.if_state and CODE[t.state] ~= op.if_state then return refuse_as('NotWaiting', t) end
  return t
end

-- -- enqueue ---------------------------------------------------------------------------------------

-- An earlier operation of this transaction may have found its key in use: then that task blocks in its place.
local function blockers_of(op)
  if not next(machine.stands_for) then return op.blocked_by end
  local named = {}
  for i, wanted in ipairs(op.blocked_by) do named[i] = {machine.stands_for[wanted[1]] or wanted[1], wanted[2]} end
  return named
end

-- The blockers that have not ended, and one that failed if there is such.
local function open_blockers(op, blocked_by)
  local waiting, seen = {}, {}
  for _, wanted in ipairs(blocked_by) do
    local id = wanted[1]
    if not seen[id] then
      seen[id] = true
      local t = store.find(queue(wanted[2] ~= '' and wanted[2] or op.queue), id)
      if t and FINAL[t.state] and t.state ~= 'completed' then
        if op.dead_blockers ~= 'ignore' then return {}, id end
      elseif t and t.state ~= 'completed' then
        waiting[#waiting + 1] = t
      end
    end
  end
  return waiting, nil
end

local function drop_staged(t)
  if not t or t.gone or t.state ~= 'staged' then return end
  store.drop_staged(t)
  if t.deps then machine.cascade({t}) end
end

function write.enqueue(op, staged)
  local q = queue(op.queue)
  if staged then
    drop_staged(staged)
    drop_staged(store.find(q, op.id))
  end
  if op.key then
    local twin = known_key(op) -- an earlier operation of this very transaction
    if twin and twin.outcome then
      machine.stands_for[op.id] = twin.outcome[1]
      return twin.outcome
    end
  end
  if op.on_conflict == 'replace_finished' then
    local old = store.find(q, op.id)
    if old then
      store.drop(old, true)
      store.flush()
    end
  end
  machine.promote(q, PROMOTE_LIMIT)
  local blockers, dead, blocked_by = {}, nil, op.blocked_by and blockers_of(op)
  if blocked_by then blockers, dead = open_blockers(op, blocked_by) end
  local due = op.eta or now + (op.delay or 0)
  local eta = op.eta_us
  if not eta and ((op.delay or 0) > 0 or op.interval_us) then eta = digits(due) .. '000' end
  local least = 0 -- who lists all tasks, in order, meets a blocker before what it blocks
  for _, blocker in ipairs(blockers) do least = math.max(least, blocker.seq + 1) end
  local t = machine.make(op, next_seq(q, least), NOW, due, eta)
  t.left = #blockers
  if blocked_by ~= op.blocked_by then set(t, 'blocked_by', cjson.encode(blocked_by)) end
  if t.gid then
    lanes.mark_grouped(q, t.gid)
    local g = lanes.group(q, t.gid)
    if (op.group_limit or 0) > 0 and g.limit <= 0 then lanes.set_limit(g, op.group_limit) end
  end
  if #blockers > 0 then
    local edges = {}
    for _, blocker in ipairs(blockers) do
      machine.block(blocker, t)
      edges[#edges + 1] = {blocker.id, blocker.q.name}
    end
    t.edges = cjson.encode(edges)
    set(t, 'edges', t.edges)
    set(t, 'left', digits(#blockers))
  end
  if op.key then store.save_key(q, op.key, op.id, op.fingerprint, now + op.key_ttl) end
  if #blockers > 0 then
    lanes.move(t, 'blocked')
  elseif not dead then
    place(t)
  end
  log.note(t, 'enqueued', op.data, t.state or (due > now and 'delayed' or 'wait'))
  if dead then
    machine.fail_behind(t, dead)
  end
  return {t.id, 0, CODE[t.state]}
end

-- -- the holder --------------------------------------------------------------------------------------

local function lease_of(op, t)
  if op.lease then return op.lease end
  return t.timeout_ms > 0 and t.timeout_ms or DEFAULT_LEASE_MS
end

function write.ack(op, t)
  local again = not t.cancel and op.again or nil
  t.listed = op.listed and not again and machine.is_listed(t)
  local ttl_ms = machine.finish(t, 'completed', {data = op.result, encoding = op.encoding}, op.token, again)
  log.note(t, 'succeeded', op.data, 'completed')
  t.q.finished = true
  if again then
    machine.schedule_again(t, again)
  elseif ttl_ms == 0 then
    store.drop(t)
  end
  if t.deps then machine.free(t.q, t.id) end
  return {again and CODE.delayed or CODE.completed, 0}
end

function write.retry(op, t)
  machine.set_error(t, op.error, op.words)
  stamp(t)
  if not op.lost then t.q.finished = true end
  if op.attempts then
    t.attempt = op.attempts
    set(t, 'attempt', digits(op.attempts))
  end
  if t.cancel then
    machine.stop(t, op.token, op.error)
    return {t.due_ms, CODE.cancelled}
  end
  if op.delay or op.due then
    give_up_lease(t)
    set_due(t, op.due or now + op.delay)
    place(t)
  else
    if not t.interval_us and t.eta_us then clear(t, 'eta_us') end
    put_back(t)
  end
  log.note(t, op.lost and 'expired' or 'retried', op.data)
  return {t.due_ms, CODE[t.state]}
end

function write.fail(op, t)
  local again = not t.cancel and op.again or nil
  local to, q = not again and t.dead_queue or nil, t.q
  machine.set_error(t, op.error, op.words)
  machine.finish(t, 'failed', {error = op.error}, op.token, again)
  log.note(t, 'failed', to and log.with(op.data, 'to_queue', cjson.encode(to)) or op.data, 'failed')
  if not op.lost then q.finished = true end
  if again then machine.schedule_again(t, again) end
  if to then machine.move_to_dead_queue(t, to) end
  if t.deps then machine.cascade({{q = q, id = t.id}}) end
  return {t.q.name, CODE[t.state], 0}
end

function write.release(op, t)
  t.attempt = math.max(t.attempt - 1, 0)
  set(t, 'attempt', digits(t.attempt))
  stamp(t)
  if t.cancel then
    machine.stop(t, op.token, machine.error_of(t))
    return {CODE.cancelled}
  end
  log.note(t, 'released')
  put_back(t)
  return {CODE.wait}
end

local function prolong(t, lease_ms)
  local until_ms = math.max(t.lock_until_ms, now + lease_ms)
  t.lock_until_ms, t.moved = until_ms, true
  set(t, 'lock_until_ms', digits(until_ms))
  stamp(t)
  return {until_ms, t.cancel and 1 or 0}
end

function write.extend(op, t)
  return prolong(t, lease_of(op, t))
end

function write.progress(op, t)
  set(t, 'progress', op.progress)
  local answer = prolong(t, lease_of(op, t))
  log.note(t, 'progress', op.data)
  return answer
end

-- -- anybody -----------------------------------------------------------------------------------------

-- The holder hears of it with its next beat, and ends the run by itself.
local function ask_to_stop(t)
  if not t.cancel then
    t.cancel = true
    set(t, 'cancel', '1')
    stamp(t)
  end
  return {CODE.active}
end

function write.cancel(op, t)
  if FINAL[t.state] then return {CODE[t.state]} end -- it fell with a blocker that ended in this very transaction
  local by_holder = op.token or op.lost -- or by the reaper: a lease that others damaged is lost without a token
  if t.state == 'active' and not by_holder then return ask_to_stop(t) end
  if op.error then
    set(t, 'error', op.error)
    set(t, 'last_error', op.words)
  end
  machine.stop(t, op.token, op.error or machine.error_of(t))
  return {CODE.cancelled}
end

function write.reschedule(op, t)
  if FINAL[t.state] then return {t.due_ms} end
  local due = op.eta or now + (op.delay or 0)
  t.eta_us = op.eta_us or digits(due) .. '000'
  set(t, 'eta_us', t.eta_us)
  stamp(t)
  set_due(t, due)
  if t.state ~= 'blocked' then
    place(t)
  end
  log.note(t, 'rescheduled')
  return {due}
end

function write.requeue(op, t)
  local q, due = t.q, op.eta or now + (op.delay or 0)
  store.flush()
  call('LREM', q.base .. 'failed', 1, t.id)
  store.delete_result(t)
  t.eta_us = op.eta_us or ((op.delay or 0) > 0 and digits(due) .. '000') or nil
  set(t, 'eta_us', t.eta_us or '')
  for _, field in ipairs({'error', 'last_error', 'last_error_ms', 'finished_ms', 'failed_ms', 'ended_by', 'worker', 'cancel',
                          'blocked_by', 'edges'}) do clear(t, field) end
  t.cancel, t.left = false, 0
  set(t, 'left', '0')
  set(t, 'lease_token', '')
  set(t, 'lock_until_ms', '')
  if op.reset_attempts then
    t.attempt = 0
    set(t, 'attempt', '0')
  end
  stamp(t)
  set_due(t, due)
  place(t)
  log.note(t, 'requeued')
  return {CODE[t.state]}
end

function write.remove(op, t)
  if t.gone then return {} end
  log.note(t, 'removed')
  local waiting = WAITING[t.state]
  store.drop(t, true)
  ended_tasks[#ended_tasks + 1] = t.id
  if waiting and t.deps then machine.cascade({t}) end
  return {}
end
