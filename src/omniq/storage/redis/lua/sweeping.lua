--[[
Carrying on. Each call works on one queue.

Other clients free no dependents, write no events and know no dead queues. `sweep` follows what they did: it takes their jobs
into our books and carries on where they ended one of our tasks.
]]

local SLACK_MS = 2000 -- clocks of other clients stamp the indexes
local FOLLOW_LIMIT = 200 -- entries of an index that one sweep looks at

local function go_on(q, limit)
  local moved = 0
  local deferred = call('HGETALL', q.o .. 'deferred')
  for i = 1, #deferred, 2 do
    if moved >= limit then break end
    call('HDEL', q.o .. 'deferred', deferred[i])
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
  call('ZADD', q.o .. 'done', machine.is_listed(t) and 'inf' or digits(t.expires_ms), t.id)
  ended_tasks[#ended_tasks + 1] = t.id
  if t.deps then machine.free(q, t.id) end
end

local function settle_failed(t, failed_ms)
  local q, to = t.q, t.dead_queue
  store.adopt(t)
  local words = text(call('HGET', t.key, 'last_error'))
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
    call('LREM', q.base .. 'failed', 1, t.id)
    lanes.move(t, 'moving')
    machine.move_to_dead_queue(t, to)
  end
  if t.deps then machine.cascade({{q = q, id = t.id}}) end
end

-- Looks at what entered a state since the last sweep, and of that at what is not in our books.
local function follow(q, state, books, limit, settle)
  local field = 'swept:' .. state
  local from = number(call('HGET', q.o .. 'meta', field))
  local found = call('ZRANGEBYSCORE', q.base .. 'idx:' .. state, digits(from), '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
  if #found == 0 then return 0 end
  local ids, moved = {}, 0
  for i = 1, #found, 2 do ids[#ids + 1] = found[i] end
  local known_ids = books and call('ZMSCORE', q.o .. books, unpack(ids)) or {}
  for i, id in ipairs(ids) do
    local t = not known_ids[i] and is_text(id) and store.load(q, id)
    if t and t.state == state and not t.odd then moved = moved + settle(t) end
  end
  local upto = now - SLACK_MS
  if #ids == limit then upto = math.max(tonumber(found[#found]), from + 1) end
  if upto > from then call('HSET', q.o .. 'meta', field, digits(upto)) end
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
    local found = call('HMGET', t.key, 'failed_ms', 'finished_ms')
    local failed_ms = text(found[1])
    -- equal: this very failure is in our books; others may have retried what failed before, and failed it again
    if (not failed_ms or failed_ms == found[2]) and call('EXISTS', t.q.o .. 'res:' .. t.id) == 1 then return 0 end
    settle_failed(t, failed_ms)
    return 1
  end)
end

-- A blocker that others ended, or that is gone, has told nobody.
local function ask_blockers(q, limit)
  local from, moved = number(call('HGET', q.o .. 'meta', 'asked')), 0
  local ids = call('ZRANGE', q.o .. 'blocked', from, from + limit - 1)
  for _, id in ipairs(ids) do
    local t = store.load(q, id)
    if t and t.odd then
      machine.put_aside(q, id)
    elseif not t or t.state ~= 'blocked' then
      call('ZREM', q.o .. 'blocked', id)
    elseif not machine.edges_of(t) then
      machine.put_aside(q, id, 'what it waits for cannot be read (its field edges)')
      moved = moved + 1
    else
      local told = true
      for _, edge in ipairs(machine.edges_of(t)) do
        local home = queue(edge[2])
        local blocker = store.find(home, edge[1])
        local bound = call('ZSCORE', home.o .. 'deps:' .. edge[1], t.q.name .. ' ' .. t.id)
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
  call('HSET', q.o .. 'meta', 'asked', #ids == limit and from + limit or 0)
  return moved
end

-- Slots of groups, counted from the leases: other clients do not give back the slot of a job whose hash is gone.
local function recount(q)
  local running = {}
  for _, id in ipairs(call('ZRANGE', q.base .. 'active', 0, -1)) do
    local gid = machine.gid_of(q, id)
    if gid then running[gid] = (running[gid] or 0) + 1 end
  end
  for _, gid in ipairs(call('ZRANGE', q.o .. 'lanes', 0, -1)) do q.lanes[gid] = true end
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
  for _, id in ipairs(call('ZRANGEBYSCORE', q.base .. 'active', '-inf', NOW, 'LIMIT', 0, 100)) do
    local t = store.load(q, id)
    local ghost, why = ghostly(t, id)
    if ghost then
      machine.put_aside(q, id, why)
      ghosts = ghosts + 1
    elseif t.state ~= 'active' then
      call('ZREM', q.base .. 'active', id)
      call('ZREM', q.base .. 'idx:active', id)
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
  if call('ZCOUNT', q.o .. 'runs', '-inf', NOW) > 0 then
    machine.need('staging')
    moved = machine.sweep_runs(q, op.limit)
  end
  moved = moved + go_on(q, op.limit)
  if moved >= op.limit then return moved end
  moved = moved + follow_others(q, math.min(op.limit, FOLLOW_LIMIT))
  store.flush()
  if call('EXISTS', q.o .. 'blocked') == 1 then moved = moved + ask_blockers(q, 200) end
  return moved + bury_ghosts(q)
end

-- -- asked for by name ------------------------------------------------------------------------------

function upkeep.promote(op)
  return machine.promote(queue(op.queue), op.limit)
end

function upkeep.limit(op)
  local q = queue(op.queue)
  lanes.mark_grouped(q, op.group)
  lanes.set_limit(lanes.group(q, op.group), op.limit)
  return 0
end
