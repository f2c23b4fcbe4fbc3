--[[
Taking in what another store kept: tasks as they stand, with their results, and events.
]]

-- Those that a task still waits for, and those that died without its having been told.
local function known_blockers(op)
  local waiting, dead, seen = {}, {}, {}
  for _, wanted in ipairs(op.blocked_by) do
    local id = wanted[1]
    if not seen[id] then
      seen[id] = true
      local t = store.find(queue(wanted[2] ~= '' and wanted[2] or op.queue), id)
      if t and not FINAL[t.state] then
        waiting[#waiting + 1] = t
      elseif t and t.state ~= 'completed' then
        dead[#dead + 1] = t
      end
    end
  end
  return waiting, op.left > #waiting and dead or {}
end

local function block(t, waiting, dead)
  local edges = {}
  for _, blockers in ipairs({waiting, dead}) do
    for _, blocker in ipairs(blockers) do
      machine.block(blocker, t)
      edges[#edges + 1] = {blocker.id, blocker.q.name}
    end
  end
  for _, blocker in ipairs(dead) do call('HSET', blocker.q.o .. 'deferred', blocker.id, '1') end
  set(t, 'edges', cjson.encode(edges))
  set(t, 'left', digits(#edges))
end

local function restore_result(t, state, op)
  local key = t.q.o .. 'res:' .. t.id
  if state == 'failed' then
    call('SET', key, op.result)
    return
  end
  call('SET', key, op.result, 'PX', digits(math.max(op.result_until - now, 0) + GRACE_MS))
  if not FINAL[state] then call('ZADD', t.q.o .. 'results', digits(op.result_until), t.id) end
end

-- Tasks come in the order in which they were made, which must stay theirs across queues too.
local function insert(op, above)
  local q, state = queue(op.queue), op.state
  local waiting, dead = {}, {}
  if state == 'blocked' then
    waiting, dead = known_blockers(op)
    if #waiting + #dead == 0 then state = 'delayed' end -- whatever it waited for has ended; it runs when it is due
  end
  for _, blocker in ipairs(waiting) do above = math.max(above, blocker.seq) end
  local t = machine.make(op, next_seq(q, above + 1), digits(op.created), op.due, nil)
  t.since, t.expires_ms = op.since, op.expires
  if t.gid then lanes.mark_grouped(q, t.gid) end
  if state == 'blocked' then block(t, waiting, dead) end
  if op.key then store.save_key(q, op.key, op.id, op.fingerprint, op.key_until) end
  if op.result then restore_result(t, state, op) end
  if WAITING[state] then ready_queues[q.name] = true end
  return t, state
end

function upkeep.restore(op)
  local new, last, returned, ended = 0, 0, {}, {}
  for _, saved in ipairs(op.tasks) do
    local there = store.find(queue(saved.queue), saved.id)
    if there and there.state == 'staged' then
      store.drop_staged(there)
      if there.deps then machine.cascade({there}) end
    end
    if (not there or there.gone) and not store.occupied[slot(queue(saved.queue), saved.id)] then
      local t, state = insert(saved, last)
      new, last = new + 1, t.seq
      if saved.returned then
        returned[#returned + 1] = t
      else
        lanes.move(t, state)
      end
      if state == 'completed' or state == 'failed' then ended[#ended + 1] = t end
    end
  end
  for i = #returned, 1, -1 do lanes.move(returned[i], 'wait', true) end
  table.sort(ended, function(a, b)
    if a.since ~= b.since then return a.since < b.since end
    return a.seq < b.seq
  end)
  for _, t in ipairs(ended) do
    local list = t.q[t.state]
    list[#list + 1] = t.id
  end
  return new
end

function upkeep.restore_events(op)
  local q = meta(queue(op.queue))
  for _, entry in ipairs(op.entries) do
    q.last_event = q.last_event + #entry[2] / 10
    call('XADD', q.o .. 'events', digits(q.last_event) .. '-0', 'e', cmsgpack.pack(entry))
  end
  q.changed, q.changed_meta = true, true
  return 0
end
