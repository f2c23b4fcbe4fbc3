--[[
What is done beside the operations: limits, sweeping, purging, checking. Each works on one queue.

Other clients free no dependents, write no events and know no dead queues. `sweep` follows what they did: it takes their jobs
into our books and carries on where they ended one of our tasks.
]]

local SLACK_MS = 2000 -- clocks of other clients stamp the indexes
local FOLLOW_LIMIT = 200 -- entries of an index that one sweep looks at
local MOST_TO_COME = 10000 -- tasks that wait for a time or for others, of which one purge learns the groups

function upkeep.promote(op)
  return machine.promote(queue(op.queue), op.limit)
end

function upkeep.limit(op)
  local q = queue(op.queue)
  lanes.mark_grouped(q, op.group)
  lanes.set_limit(lanes.group(q, op.group), op.limit)
  return 0
end

-- -- sweep -------------------------------------------------------------------------------------------

local function go_on(q, limit)
  local moved = 0
  local deferred = run('HGETALL', q.o .. 'deferred')
  for i = 1, #deferred, 2 do
    if moved >= limit then break end
    run('HDEL', q.o .. 'deferred', deferred[i])
    if deferred[i + 1] == '1' then
      moved = moved + machine.cascade({{q = q, id = deferred[i]}})
    else
      moved = moved + machine.free(q, deferred[i])
    end
  end
  return moved
end

local function settle_completed(t)
  local q = t.q
  store.adopt(t)
  store.flush()
  t.expires_ms = now + (t.ttl_ms or DEFAULT_TTL_MS)
  set(t, 'finished_ms', NOW)
  store.save_result(t, CODE.completed, {ends = true}, false, t.expires_ms - now)
  log.note(t, 'succeeded', '{"foreign":true}')
  run('ZADD', q.o .. 'done', machine.is_listed(t) and 'inf' or digits(t.expires_ms), t.id)
  ended_tasks[#ended_tasks + 1] = t.id
  if t.deps then machine.free(q, t.id) end
end

local function settle_failed(t, failed_ms)
  local q, to = t.q, t.dead_queue
  store.adopt(t)
  local words = text(run('HGET', t.key, 'last_error'))
  if words and not is_text(words) then words = string.gsub(words, '[%z\128-\255]', '?') end
  local failure
  if words then
    local kind, message = string.match(words, '^([%w_.]+): (.+)$')
    failure = '{"type":' .. cjson.encode(kind or '') .. ',"message":' .. cjson.encode(message or words) .. ',"traceback":""}'
  end
  set(t, 'finished_ms', failed_ms or NOW)
  set(t, 'error', failure or '')
  local ttl_ms = t.ttl_ms or DEFAULT_TTL_MS
  if not to or ttl_ms > 0 then store.save_result(t, CODE.failed, {error = failure, ends = not to}, not to, ttl_ms) end
  local data = failure and log.with(nil, 'error', log.brief(failure)) or nil
  log.note(t, 'failed', log.with(to and log.with(data, 'to_queue', cjson.encode(to)) or data, 'foreign', 'true'))
  ended_tasks[#ended_tasks + 1] = t.id
  if to then
    store.flush()
    run('LREM', q.base .. 'failed', 1, t.id)
    lanes.move(t, 'moving')
    machine.move_to_dead_queue(t, to)
  end
  if t.deps then machine.cascade({{q = q, id = t.id}}) end
end

-- Looks at what entered a state since the last sweep, and of that at what is not in our books.
local function follow(q, state, books, limit, settle)
  local field = 'swept:' .. state
  local from = number(run('HGET', q.o .. 'meta', field))
  local found = run('ZRANGEBYSCORE', q.base .. 'idx:' .. state, digits(from), '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
  if #found == 0 then return 0 end
  local ids, moved = {}, 0
  for i = 1, #found, 2 do ids[#ids + 1] = found[i] end
  local known_ids = books and run('ZMSCORE', q.o .. books, unpack(ids)) or {}
  for i, id in ipairs(ids) do
    local t = not known_ids[i] and is_text(id) and store.load(q, id)
    if t and t.state == state and not t.odd then moved = moved + settle(t) end
  end
  local upto = now - SLACK_MS
  if #ids == limit then upto = math.max(tonumber(found[#found]), from + 1) end
  if upto > from then run('HSET', q.o .. 'meta', field, digits(upto)) end
  return moved
end

local function adopt(t)
  store.adopt(t)
  return 0
end

local function follow_others(q, limit)
  for _, state in ipairs({'wait', 'delayed', 'active'}) do follow(q, state, 'tasks', limit, adopt) end
  local moved = follow(q, 'completed', 'done', limit, function(t)
    settle_completed(t)
    return 1
  end)
  return moved + follow(q, 'failed', nil, limit, function(t)
    local found = run('HMGET', t.key, 'failed_ms', 'finished_ms')
    local failed_ms = text(found[1])
    -- equal: this very failure is in our books; others may have retried what failed before, and failed it again
    if (not failed_ms or failed_ms == found[2]) and run('EXISTS', t.q.o .. 'res:' .. t.id) == 1 then return 0 end
    settle_failed(t, failed_ms)
    return 1
  end)
end

-- A blocker that others ended, or that is gone, has told nobody.
local function ask_blockers(q, limit)
  local from, moved = number(run('HGET', q.o .. 'meta', 'asked')), 0
  local ids = run('ZRANGE', q.o .. 'blocked', from, from + limit - 1)
  for _, id in ipairs(ids) do
    local t = store.load(q, id)
    if t and t.odd then
      machine.put_aside(q, id)
    elseif not t or t.state ~= 'blocked' then
      run('ZREM', q.o .. 'blocked', id)
    elseif not machine.edges_of(t) then
      machine.put_aside(q, id, 'what it waits for cannot be read (its field edges)')
      moved = moved + 1
    else
      local told = true
      for _, edge in ipairs(machine.edges_of(t)) do
        local home = queue(edge[2])
        local blocker = store.find(home, edge[1])
        local bound = run('ZSCORE', home.o .. 'deps:' .. edge[1], t.q.name .. ' ' .. t.id)
        told = told and not bound
        if t.state == 'blocked' and bound then
          if not blocker or blocker.state == 'completed' then
            machine.let_go(home, edge[1], t)
            moved = moved + 1
          elseif FINAL[blocker.state] then
            machine.forget_blockers(t)
            machine.fail_behind(t, edge[1])
            if t.deps then machine.cascade({{q = q, id = t.id}}) end
            moved = moved + 1
          end
        end
      end
      if told then -- all that it waited for let it go, and yet it waits: somebody wrote another number into it
        t.left = 1
        machine.let_go(q, '', t)
        moved = moved + 1
      end
    end
  end
  run('HSET', q.o .. 'meta', 'asked', #ids == limit and from + limit or 0)
  return moved
end

-- The group of a job whose key may hold anything.
local function gid_of(q, id)
  local gid = redis.pcall('HGET', job_key(q, id), 'gid')
  return type(gid) == 'string' and text(gid) or nil
end

-- Slots of groups, counted from the leases.
local function recount(q)
  local running = {}
  for _, id in ipairs(run('ZRANGE', q.base .. 'active', 0, -1)) do
    local gid = gid_of(q, id)
    if gid then running[gid] = (running[gid] or 0) + 1 end
  end
  for _, gid in ipairs(run('ZRANGE', q.o .. 'lanes', 0, -1)) do q.lanes[gid] = true end
  for gid in pairs(q.lanes) do
    local g = lanes.group(q, gid)
    g.inflight = running[gid] or 0
    lanes.look(g)
  end
end

-- What is wrong with a lease, if nobody could ever take it back.
local function ghostly(t, id)
  if not t or t.odd or not is_text(id) then return true end
  if t.state == 'active' and t.lease_token and not is_text(t.lease_token) then return true, 'its lease_token is no text' end
  return false
end

-- A lease without a task: its hash was evicted or deleted, or cannot be read, and its group would keep the slot for ever.
local function bury_ghosts(q)
  local ghosts = 0
  for _, id in ipairs(run('ZRANGEBYSCORE', q.base .. 'active', '-inf', NOW, 'LIMIT', 0, 100)) do
    local t = store.load(q, id)
    local ghost, why = ghostly(t, id)
    if ghost then
      machine.put_aside(q, id, why)
      ghosts = ghosts + 1
    elseif t.state ~= 'active' then
      run('ZREM', q.base .. 'active', id)
      run('ZREM', q.base .. 'idx:active', id)
      ghosts = ghosts + 1
    end
  end
  if ghosts > 0 then
    recount(q)
    q.changed = true
  end
  return ghosts
end

function upkeep.bury(op)
  return bury_ghosts(queue(op.queue))
end

function upkeep.sweep(op)
  local q, moved = queue(op.queue), 0
  if run('ZCOUNT', q.o .. 'runs', '-inf', NOW) > 0 then
    machine.need('staging')
    moved = machine.sweep_runs(q, op.limit)
  end
  moved = moved + go_on(q, op.limit)
  if moved >= op.limit then return moved end
  moved = moved + follow_others(q, math.min(op.limit, FOLLOW_LIMIT))
  store.flush()
  if run('EXISTS', q.o .. 'blocked') == 1 then moved = moved + ask_blockers(q, 200) end
  return moved + bury_ghosts(q)
end

-- -- purge -------------------------------------------------------------------------------------------

local function purge_ended(q, name, upto, limit)
  local ids = run('ZRANGEBYSCORE', q.o .. name, '-inf', upto, 'LIMIT', 0, limit)
  for _, id in ipairs(ids) do
    local t = store.load(q, id)
    run('DEL', q.o .. 'res:' .. id)
    run('ZREM', q.o .. name, id)
    if t and FINAL[t.state] then
      store.drop(t)
    elseif not t then
      run('ZREM', q.o .. 'tasks', id)
    end
  end
  return #ids
end

-- Other clients trim the list of completed jobs without knowing our books.
local function purge_trimmed(q, limit)
  local gone = 0
  for _, id in ipairs(run('ZRANGEBYSCORE', q.o .. 'done', 'inf', 'inf', 'LIMIT', 0, COMPLETED_KEEP + limit)) do
    if run('EXISTS', job_key(q, id)) == 0 then
      run('DEL', q.o .. 'res:' .. id)
      run('ZREM', q.o .. 'done', id)
      run('ZREM', q.o .. 'tasks', id)
      gone = gone + 1
    end
  end
  return gone
end

local function purge_dead(q, upto, limit)
  local ids = run('ZRANGEBYSCORE', q.base .. 'idx:failed', '-inf', upto, 'LIMIT', 0, limit)
  for _, id in ipairs(ids) do
    local t = store.load(q, id)
    run('LREM', q.base .. 'failed', -1, id)
    if t and t.state == 'failed' then
      store.drop(t)
    else
      run('ZREM', q.base .. 'idx:failed', id)
    end
  end
  return #ids
end

local function purge_keys(q, limit)
  local gone = 0
  for _, key in ipairs(run('ZRANGEBYSCORE', q.o .. 'keys', '-inf', NOW, 'LIMIT', 0, limit)) do
    local found = store.key(q, key)
    local t = found and store.find(q, found.id)
    if not t or FINAL[t.state] then
      store.delete_key(q, key)
      gone = gone + 1
    else
      run('ZADD', q.o .. 'keys', digits(now + 3600000), key) -- its task lives on; look again later
    end
  end
  return gone
end

local function purge_events(q, op)
  local stream = q.o .. 'events'
  local found = run('HMGET', q.o .. 'meta', 'events', 'first')
  local last, first = number(found[1]), math.max(number(found[2]), 1)
  local edge = first - 1 -- the last number that goes
  if op.events_max then edge = math.max(edge, last - op.events_max) end
  local entries = run('XRANGE', stream, '-', '+', 'COUNT', op.limit)
  for _, entry in ipairs(entries) do
    local upto = tonumber(string.match(entry[1], '^%d+'))
    if op.events_before and cmsgpack.unpack(entry[2][2])[1] <= op.events_before then edge = math.max(edge, upto) end
  end
  edge = math.min(edge, first - 1 + op.limit)
  if edge < first then return 0 end
  for _, entry in ipairs(entries) do
    if tonumber(string.match(entry[1], '^%d+')) <= edge then run('XDEL', stream, entry[1]) end
  end
  run('HSET', q.o .. 'meta', 'first', digits(edge + 1))
  return edge + 1 - first
end

-- The groups of the tasks that are in no lane yet; nothing if there are too many to look at.
local function groups_to_come(q)
  local members = {'delayed', 'o:blocked'}
  if run('ZCARD', q.base .. 'delayed') + run('ZCARD', q.o .. 'blocked') > MOST_TO_COME then return nil end
  local names = {}
  for _, set_name in ipairs(members) do
    for _, id in ipairs(run('ZRANGE', q.base .. set_name, 0, -1)) do
      local gid = gid_of(q, id)
      if gid then names[gid] = true end
    end
  end
  return names
end

-- Groups without tasks go, those with a limit when they have been at rest since `limits_before`.
local function purge_lanes(q, op)
  local gone, to_come = 0, nil
  local cursor = run('HGET', q.o .. 'meta', 'lanes') or '-'
  local names = run('ZRANGEBYLEX', q.o .. 'lanes', cursor, '+', 'LIMIT', 0, op.limit)
  for _, gid in ipairs(names) do
    local base, rest = q.base .. 'g:' .. gid, q.o .. 'rest:' .. gid
    if run('EXISTS', base .. ':wait', base .. ':inflight') > 0 then
      run('DEL', rest) -- another client may have brought its tasks
    else
      if to_come == nil then to_come = groups_to_come(q) or false end
      local limited, since = run('EXISTS', base .. ':limit') == 1, run('GET', rest)
      if to_come and to_come[gid] then
        run('DEL', rest)
      elseif not limited or (to_come and since and op.limits_before and number(since) <= op.limits_before) then
        run('DEL', base .. ':limit', rest)
        gone = gone + run('ZREM', q.o .. 'lanes', gid)
      elseif not since then
        run('SET', rest, NOW)
      end
    end
  end
  run('HSET', q.o .. 'meta', 'lanes', #names == op.limit and '(' .. names[#names] or '-')
  return gone
end

-- What was put aside goes as dead letters do, which most of it is.
local function purge_corrupt(q, upto)
  local gone, entries = 0, run('HGETALL', q.o .. 'corrupt')
  for i = 1, #entries, 2 do
    if number(string.match(entries[i + 1], '^%d+')) <= upto then
      local id = entries[i]
      local t = is_text(id) and store.load(q, id)
      if not t then gone = gone + run('DEL', job_key(q, id)) end
      run('HDEL', q.o .. 'corrupt', id)
    end
  end
  return gone
end

-- Staged runs that are over, when their keys are.
local function purge_runs(q, limit)
  local ids = run('ZRANGEBYSCORE', q.o .. 'ended', '-inf', NOW, 'LIMIT', 0, limit)
  for _, id in ipairs(ids) do
    run('DEL', q.o .. 'run:' .. id, q.o .. 'rows:' .. id)
    run('ZREM', q.o .. 'ended', id)
  end
  return #ids
end

function upkeep.purge(op)
  local q = queue(op.queue)
  local upto = NOW
  local gone = 0
  for _, name in ipairs({'done', 'cancelled', 'results'}) do gone = gone + purge_ended(q, name, upto, op.limit) end
  gone = gone + purge_trimmed(q, op.limit)
  if op.dead_before then
    gone = gone + purge_dead(q, digits(op.dead_before), op.limit) + purge_corrupt(q, op.dead_before)
  end
  store.flush()
  return gone + purge_keys(q, op.limit) + purge_events(q, op) + purge_lanes(q, op) + purge_runs(q, op.limit)
end

-- Results that were stored before a moment, from the ids that the caller read.
function upkeep.forget(op)
  local q, gone = queue(op.queue), 0
  for _, id in ipairs(op.ids) do
    local found = run('GET', q.o .. 'res:' .. id)
    if found and tonumber(string.match(found, '^%d+ (%d+)')) < op.before then
      local t = store.load(q, id)
      run('DEL', q.o .. 'res:' .. id)
      run('ZREM', q.o .. 'results', id)
      if t and FINAL[t.state] then store.drop(t) end
      gone = gone + 1
    end
  end
  return gone
end

-- -- check -------------------------------------------------------------------------------------------

local function as_set(list)
  local found = {}
  for _, value in ipairs(list) do found[value] = true end
  return found
end

-- Compares an index with what it should hold: complaints, and with `repair` the index is set right.
local function compare(key, true_ids, complaints, repair)
  local there = as_set(run('ZRANGE', key, 0, -1))
  for id in pairs(true_ids) do
    if not there[id] then
      complaints[#complaints + 1] = key .. ' lacks ' .. id
      if repair then run('ZADD', key, NOW, id) end
    end
  end
  for id in pairs(there) do
    if not true_ids[id] then
      complaints[#complaints + 1] = key .. ' still has ' .. id
      if repair then run('ZREM', key, id) end
    end
  end
end

local function check_lane(q, gid, key, waiting, complaints, repair)
  for _, id in ipairs(run('LRANGE', key, 0, -1)) do
    local found = redis.pcall('HMGET', job_key(q, id), 'state', 'gid')
    if found[1] == 'wait' and text(found[2]) == gid and not waiting[id] then
      waiting[id] = true
    else
      complaints[#complaints + 1] = key .. ' has a stray entry ' .. id
      if repair then run('LREM', key, -1, id) end
    end
  end
end

-- The run settles the task once more, by the state that it is in; one without a run goes.
local function list_staged(q, id, run_id, value)
  local found = run('HMGET', q.o .. 'run:' .. run_id, 'state', 'expires')
  if not found[1] then
    store.drop_staged(store.shape_staged(q, id, value))
    return
  end
  run('RPUSH', q.o .. 'rows:' .. run_id, id)
  run('HSET', q.o .. 'run:' .. run_id, 'settled', '0')
  run('ZADD', q.o .. 'runs', found[1] == 'OPEN' and found[2] or '0', run_id)
  run('ZREM', q.o .. 'ended', run_id)
end

-- A staged task must be listed, and its run must come by it when it ends.
local function check_staged(q, complaints, repair)
  local rows = {}
  for _, id in ipairs(run('ZRANGE', q.o .. 'runs', 0, -1)) do rows[id] = as_set(run('LRANGE', q.o .. 'rows:' .. id, 0, -1)) end
  local staged = run('HGETALL', q.o .. 'staged')
  machine.need('staging')
  for i = 1, #staged, 2 do
    local id, row = staged[i], store.read_staged(staged[i + 1])
    local run_id = row.run_id
    if not run('ZSCORE', q.o .. 'tasks', id) then
      complaints[#complaints + 1] = q.o .. 'tasks lacks ' .. id
      if repair then run('ZADD', q.o .. 'tasks', row.seq, id) end
    end
    if not (rows[run_id] and rows[run_id][id]) then
      complaints[#complaints + 1] = 'run ' .. run_id .. ' does not know its task ' .. id
      if repair then list_staged(q, id, run_id, staged[i + 1]) end
    end
  end
  for _, id in ipairs(run('HKEYS', q.o .. 'claims')) do
    if run('HEXISTS', q.o .. 'staged', id) == 0 then
      complaints[#complaints + 1] = q.o .. 'claims still has ' .. id
      if repair then run('HDEL', q.o .. 'claims', id) end
    end
  end
end

-- A dead letter that was requeued or deleted, and a key that somebody deleted, is nobody's trouble any more.
local function is_settled(q, id)
  local state = redis.pcall('HGET', job_key(q, id), 'state')
  if is_text(id) and type(state) ~= 'table' then return state ~= 'failed' end
  return run('EXISTS', job_key(q, id)) == 0
end

local function check_corrupt(q, complaints)
  local entries = run('HGETALL', q.o .. 'corrupt')
  for i = 1, #entries, 2 do
    local id = entries[i]
    if is_settled(q, id) then
      run('HDEL', q.o .. 'corrupt', id)
    else
      complaints[#complaints + 1] = 'job ' .. id .. ' was put aside: ' .. string.match(entries[i + 1], '^%d+ (.*)$')
    end
  end
end

function upkeep.check(op)
  local q, complaints, repair = queue(op.queue), {}, op.repair
  local waiting, running, counts = {}, {}, {}
  local names = as_set(op.groups)
  for _, key in ipairs({q.o .. 'lanes', q.base .. 'groups:ready'}) do
    for _, gid in ipairs(run('ZRANGE', key, 0, -1)) do names[gid] = true end
  end
  for _, id in ipairs(run('ZRANGE', q.base .. 'idx:wait', 0, -1)) do
    local gid = gid_of(q, id)
    if gid then names[gid] = true end
  end
  check_lane(q, nil, q.base .. 'wait', waiting, complaints, repair)
  for gid in pairs(names) do check_lane(q, gid, q.base .. 'g:' .. gid .. ':wait', waiting, complaints, repair) end
  for _, id in ipairs(run('ZRANGE', q.base .. 'active', 0, -1)) do
    local found = redis.pcall('HMGET', job_key(q, id), 'state', 'gid')
    if found[1] ~= 'active' then
      complaints[#complaints + 1] = 'the lease of ' .. id .. ' has no running task'
      if repair then run('ZREM', q.base .. 'active', id) end
    else
      running[id] = true
      local gid = text(found[2])
      if gid then counts[gid], names[gid] = (counts[gid] or 0) + 1, true end
    end
  end
  compare(q.base .. 'idx:wait', waiting, complaints, repair)
  compare(q.base .. 'idx:active', running, complaints, repair)
  compare(q.base .. 'idx:delayed', as_set(run('ZRANGE', q.base .. 'delayed', 0, -1)), complaints, repair)
  compare(q.base .. 'idx:failed', as_set(run('LRANGE', q.base .. 'failed', 0, -1)), complaints, repair)
  compare(q.base .. 'idx:completed', as_set(run('LRANGE', q.base .. 'completed', 0, -1)), complaints, repair)
  check_staged(q, complaints, repair)
  check_corrupt(q, complaints)
  local grouped, open = 0, 0
  for gid in pairs(names) do
    local g = lanes.group(q, gid)
    local right = counts[gid] or 0
    grouped = grouped + g.ready
    if g.inflight ~= right then
      complaints[#complaints + 1] = 'group ' .. gid .. ' counts ' .. g.inflight .. ' running tasks and has ' .. right
      g.inflight = right
    end
    local was = g.open
    lanes.look(g)
    if g.open then open = open + 1 end
    if was ~= g.open then complaints[#complaints + 1] = 'group ' .. gid .. (was and ' only seems' or ' fails') .. ' to be ready' end
    if repair then lanes.write(g) else g.changed, groups[q.name .. '\0' .. gid] = false, nil end
  end
  local ungrouped = run('LLEN', q.base .. 'wait')
  local right = {
    waiting = ungrouped, group_waiting = grouped, waiting_total = ungrouped + grouped,
    active = run('ZCARD', q.base .. 'active'), delayed = run('ZCARD', q.base .. 'delayed'),
    failed = run('LLEN', q.base .. 'failed'), completed_kept = run('LLEN', q.base .. 'completed'), groups_ready = open,
  }
  for field, value in pairs(right) do
    local counted = number(run('HGET', q.base .. 'stats', field))
    if counted ~= value then
      complaints[#complaints + 1] = 'stats counts ' .. counted .. ' ' .. field .. ' and there are ' .. value
      if repair then run('HSET', q.base .. 'stats', field, value) end
    end
  end
  return complaints
end
